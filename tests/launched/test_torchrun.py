"""Scripts of PyTorch under torchrun."""

from __future__ import annotations

import contextlib
from collections import Counter
from unittest.mock import MagicMock

import numpy as np
import pytest

from .conftest import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import datetime, os, sys
import numpy as np
import torch
import torch.distributed as dist
import dshuffle

url, folder, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
attempt, kills = os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[4] == "kill"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# A store for each attempt. In the default store, ranks of PyTorch 2.13 that have started again sometimes find the
# addresses of the ranks before them, also without dshuffle, and wait for them without an end.
store = dist.FileStore(f"{folder}/store-{attempt}", world_size)
minute = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=minute)
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with dshuffle.spmd(url, batch_size=8, device="cpu", checkpoint=f"{folder}/run.json", timeout=120) as loader:
    loader.attach(model=model, optimizer=optimizer)
    steps = [int(state["step"]) for state in optimizer.state.values()]
    for epoch in loader.epochs(epochs):
        assert steps in ([], [7 * epoch.number] * 2), "the optimizer is that of the checkpoint"
        seen = []
        for number, (ids, x) in enumerate(epoch):
            assert isinstance(x, torch.Tensor) and (x == ids[:, None]).all()
            optimizer.zero_grad()
            model(x / 100).square().mean().backward()
            optimizer.step()
            seen.append(ids.numpy())
            if kills and (attempt, rank, epoch.number, number) == ("0", 1, 1, 3):
                os.kill(os.getpid(), 9)
        np.save(f"{folder}/{epoch.number}-{rank}.npy", np.concatenate(seen))
        steps = [int(state["step"]) for state in optimizer.state.values()]
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, [one.tolist() for one in model.parameters()])
    assert all(one == weights[0] for one in weights)
dist.barrier()
dist.destroy_process_group()
with open(f"{folder}/done-{attempt}-{rank}", "w") as file:
    file.write("done")
"""


def counts(folder, epoch):
    return Counter(np.concatenate([np.load(path) for path in folder.glob(f"{epoch}-*.npy")]).tolist())


@pytest.mark.parametrize("kill", ["no", "kill"])
def test_a_script_under_torchrun(torch, tmp_path, store, kill):
    """With `kill`, rank 1 is killed in epoch 1, torchrun starts all ranks again, and they resume in this epoch."""
    folder = tmp_path / "out"
    folder.mkdir()
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    ran = torchrun(tmp_path, SCRIPT, store, folder, 3, kill, options=options)
    assert ran.returncode == 0, ran.stderr
    attempts, ranks = zip(*(path.name.split("-")[1:] for path in sorted(folder.glob("done-*"))), strict=True)
    assert ranks == ("0", "1")
    assert set(attempts) == {"0" if kill == "no" else "1"}
    for epoch in range(3):
        assert counts(folder, epoch) == Counter(range(103))


def test_the_next_batch_is_copied_while_one_is_trained_on(torch, monkeypatch):
    """On CUDA, which the tests do not have: streams and copies are recorded, and done by the CPU."""
    from dshuffle.integrations.torch import on_card

    log, cuda = [], MagicMock()
    cuda.stream.side_effect = lambda stream: log.append("copy") or contextlib.nullcontext()
    cuda.current_stream.return_value.wait_stream.side_effect = lambda stream: log.append("wait")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append("record"))
    batches = on_card(lambda number: (np.full(2, number),), 3, torch.device("cpu"))
    given = []
    for number in range(3):
        given.append(batches(number)[0].tolist())
        log.append("train")
    assert given == [[0, 0], [1, 1], [2, 2]]
    expected = "copy wait record copy train wait record copy train wait record train"
    assert log == expected.split()
