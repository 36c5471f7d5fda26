"""Lightning trains on every sample once an epoch with an ExchangeSampler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIGHTNING = """
import sys
import lightning
import torch
from torch.utils.data import DataLoader
from dshuffle.integrations.sampler import ExchangeSampler

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        with open(f"{sys.argv[1]}/{self.current_epoch}-{self.global_rank}", "a") as file:
            file.write("".join(f"{int(sample)} " for sample in batch))
        return self.layer(batch.float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        samples = list(range(96))
        return DataLoader(samples, batch_size=8, sampler=ExchangeSampler(samples))

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet).fit(Model())
"""


def test_two_ranks_train_on_every_sample(torch, tmp_path):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    path, folder = tmp_path / "script.py", tmp_path / "ids"
    path.write_text(LIGHTNING)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    orders = [[(folder / f"{epoch}-{rank}").read_text().split() for rank in range(2)] for epoch in range(2)]
    for first, second in orders:
        assert Counter(map(int, first + second)) == Counter(range(96))
    assert orders[0] != orders[1], "set_epoch was called"
