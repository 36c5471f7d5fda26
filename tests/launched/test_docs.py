"""The scripts in docs/launchers.md run with two ranks, and train on every sample once an epoch."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dshuffle

from .conftest import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here")]

PYTORCH_ABORT = "terminate called without an active exception"
"""What a process of PyTorch sometimes says at its end on a busy machine, also without dshuffle."""

SAMPLES = 203
BATCHES = 7
"""Batches of a rank in an epoch."""

RECORD = """
import os

def record(x):
    if x.ndim == 2:
        with open(f"ids-{os.environ['RANK']}", "a") as file:
            print(*[int(row[0]) for row in x], file=file)
"""
"""Writes down what a rank trains on: the first feature of a sample is its number."""

RECORD_LINEAR = f"""
import torch
{RECORD}
forward = torch.nn.Linear.forward
torch.nn.Linear.forward = lambda layer, x: record(x) or forward(layer, x)
"""

RECORD_JAX = f"""
import jax.numpy
{RECORD}
asarray = jax.numpy.asarray
jax.numpy.asarray = lambda x: record(x) or asarray(x)
"""


@pytest.fixture
def arrays():
    x = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype("f4")
    x[:, 0] = np.arange(SAMPLES)
    return {"x": x, "y": np.arange(SAMPLES) % 2}


@pytest.fixture
def folder(tmp_path, arrays):
    dshuffle.create_dataset(str(tmp_path / "train.zarr"), arrays)
    return tmp_path


def script_with(text):
    [script] = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if text in block]
    return script


def train(folder, script):
    ran = torchrun(folder, script)
    assert ran.returncode == 0 or PYTORCH_ABORT in ran.stderr, ran.stderr


def check_batches(folder, epochs):
    """Each rank has trained on all of its batches, whose ids are returned."""
    ranks = [(folder / f"ids-{rank}").read_text().splitlines() for rank in range(2)]
    assert [len(batches) for batches in ranks] == [epochs * BATCHES] * 2
    return ranks


def check_ids(folder, epochs):
    """Every sample was in one batch of one rank in each epoch."""
    ranks = check_batches(folder, epochs)
    for begin in range(0, epochs * BATCHES, BATCHES):
        ids = " ".join(batch for batches in ranks for batch in batches[begin : begin + BATCHES]).split()
        assert Counter(map(int, ids)) == Counter(range(SAMPLES))


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_script_runs_before_and_after(torch, folder, arrays, sign):
    [diff] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign, "")]
    if sign == "-":
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
    train(folder, RECORD_LINEAR + "\n".join(lines))
    check_batches(folder, epochs=3)
    if sign == "+":
        check_ids(folder, epochs=3)
        check_saved(folder)


def check_saved(folder):
    saved = json.loads((folder / "run.json").read_bytes().partition(b"\n")[0])
    assert (saved["state"]["epoch"], saved["state"]["trained"]) == (3, [])
    assert saved["attached_nbytes"] > 0


def test_lightning_trains_and_continues(torch, folder):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    script = RECORD_LINEAR + script_with("import lightning")
    train(folder, script.replace("max_epochs=3", "max_epochs=2"))
    check_ids(folder, epochs=2)
    train(folder, script)
    check_ids(folder, epochs=3)


def test_lightning_is_stopped_in_the_middle_of_an_epoch(torch, folder):
    """``max_steps`` ends epoch 1 after 3 batches. The job that continues trains on the rest of it and on epoch 2."""
    pytest.importorskip("lightning", reason="Lightning is not installed")
    script = RECORD_LINEAR + script_with("import lightning")
    train(folder, script.replace("max_epochs=3", f"max_steps={BATCHES + 3}"))
    train(folder, script)
    ranks = [" ".join((folder / f"ids-{rank}").read_text().splitlines()).split() for rank in range(2)]
    assert Counter(map(int, itertools.chain(*ranks))) == {sample: 3 for sample in range(SAMPLES)}


def test_accelerate_trains(torch, folder):
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    train(folder, RECORD_LINEAR + script_with("import Accelerator"))
    check_ids(folder, epochs=3)
    check_saved(folder)


@pytest.mark.torch  # installed beside it in CI
def test_jax_trains(folder, in_processes, monkeypatch):
    pytest.importorskip("jax", reason="JAX is not installed")
    monkeypatch.chdir(folder)
    codes, errors = in_processes(RECORD_JAX + script_with("import jax")).end(seconds=250)
    assert codes == [0, 0], errors
    check_ids(folder, epochs=3)
