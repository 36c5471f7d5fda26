"""The loops of docs/training.md run, and learn."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here (tests of the installed wheel)")

TRUTH = np.array([2.0, -1.0, 0.5])


def loops():
    names: dict[str, object] = {}  # the blocks import what they need
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    return names


def linear(fake_shuffler, n_samples, n_workers):
    x = np.random.default_rng(0).normal(size=(n_samples, 3))
    return fake_shuffler({"x": x, "y": x @ TRUTH}, n_workers=n_workers)


def test_the_loop_that_averages_once_an_epoch(fake_shuffler):
    weights = loops()["fit"](linear(fake_shuffler, 1500, 3), np.zeros(3), epochs=60)
    np.testing.assert_allclose(weights, TRUTH, atol=1e-3)


def test_the_loop_that_averages_in_every_step(fake_shuffler):
    # 64, 64 and 65 samples: one step would do for two of the ranks.
    weights = np.zeros(3)
    for epoch in linear(fake_shuffler, 193, 3).epochs(80):
        found = epoch.together(loops()["together"], weights, 0.1)
        assert len({one.tobytes() for one in found}) == 1, "all ranks have the same"
        weights = found[0]
    np.testing.assert_allclose(weights, TRUTH, atol=1e-3)


def test_a_share_of_one_sample_comes_to_every_step(fake_shuffler, monkeypatch):
    def uneven(sharding, n_samples, n_workers, *, seed):
        return np.minimum(np.arange(n_samples), 1)  # 1 sample and 192: three steps, two of them empty for rank 0

    monkeypatch.setattr(sys.modules[fake_shuffler.__module__], "first_ranks", uneven)
    shuffler = linear(fake_shuffler, 193, 2)
    [epoch] = shuffler.epochs(1)
    assert [len(partition) for partition in epoch.partitions] == [1, 192]
    found = epoch.together(loops()["together"], np.zeros(3), 0.1)
    assert np.isfinite(found[0]).all()
    assert found[0].tobytes() == found[1].tobytes()
