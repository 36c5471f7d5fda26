"""Libraries that run the training loop train on every sample once an epoch with an ExchangeSampler."""

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

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from dshuffle.integrations.sampler import ExchangeSampler

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
samples = list(range(96))
sampler = ExchangeSampler(samples)
loader = DataLoader(samples, batch_size=8, sampler=sampler)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        accelerator.backward(model(batch.float()[:, None].to(accelerator.device)).mean())
        optimizer.step()
        with open(f"{sys.argv[1]}/{epoch}-{accelerator.process_index}", "a") as file:
            file.write("".join(f"{int(sample)} " for sample in batch))
"""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("package", "script", "launcher"), [("lightning", LIGHTNING, ()), ("accelerate", ACCELERATE, TORCHRUN)]
)
def test_two_ranks_train_on_every_sample(torch, tmp_path, package, script, launcher):
    pytest.importorskip(package, reason=f"{package} is not installed")
    path, folder = tmp_path / "script.py", tmp_path / "ids"
    path.write_text(script)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(path), str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    orders = []
    for epoch in range(2):
        ranks = [(folder / f"{epoch}-{rank}").read_text().split() for rank in range(2)]
        assert Counter(map(int, ranks[0] + ranks[1])) == Counter(range(96))
        orders.append(ranks)
    assert orders[0] != orders[1], "set_epoch was called"
