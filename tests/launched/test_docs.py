"""The script in docs/launchers.md runs under torchrun, before and after the change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dshuffle

PAGE = Path(__file__).parents[2] / "docs" / "launchers.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here")]

PYTORCH_ABORT = "terminate called without an active exception"
"""What a process of PyTorch sometimes says at its end on a busy machine, also without dshuffle."""


@pytest.mark.parametrize("sign", ["-", "+"])
def test_the_script_runs_before_and_after(torch, tmp_path, sign):
    [diff] = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign, "")]
    (tmp_path / "train.py").write_text("\n".join(lines))
    x, y = np.random.default_rng(0).normal(size=(203, 8)).astype("f4"), np.arange(203) % 2
    if sign == "-":
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
    else:
        dshuffle.create_dataset(str(tmp_path / "train.zarr"), {"x": x, "y": y})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for _ in range(3):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, cwd=tmp_path)
        if PYTORCH_ABORT not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr
    if sign == "+":
        state = json.loads((tmp_path / "run.json").read_text())["state"]
        assert (state["epoch"], state["trained"]) == (3, [])
        assert state["attached"] is not None
