"""The loops of docs/training.md run, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import dshuffle

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here (tests of the installed wheel)")

TRUTH = np.array([2.0, -1.0, 0.5])


def loops():
    names: dict[str, object] = {}  # the blocks import what they need
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    return names


def linear(n_samples):
    x = np.random.default_rng(0).normal(size=(n_samples, 3))
    return dshuffle.create_dataset("memory://loops-of-docs", {"x": x, "y": x @ TRUTH}, overwrite=True)


def test_the_loop_that_averages_once_an_epoch(threads):
    with dshuffle.Shuffler(threads, linear(1500)) as shuffler:
        weights = loops()["fit"](shuffler, np.zeros(3), epochs=30)
    np.testing.assert_allclose(weights, TRUTH, atol=1e-2)


@pytest.mark.parametrize("shares", ["even", [1, 100, 100]])
def test_the_loop_that_averages_in_every_step(threads, shares):
    """Of 64, 64 and 65 samples, one step would do for two of the ranks; with 1 or 2, steps of that rank are empty."""
    weights = np.zeros(3)
    with dshuffle.Shuffler(threads, linear(193), shares=shares) as shuffler:
        for epoch in shuffler.epochs(40):
            found = epoch.together(loops()["together"], weights, 0.1)
            assert len({one.tobytes() for one in found}) == 1, "all ranks have the same"
            weights = found[0]
    np.testing.assert_allclose(weights, TRUTH, atol=0.1)
