"""Run ``dshuffle compare`` in a folder of its own."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.synthetic import keyed_regression


def run(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("dshuffle.pipeline.pipeline.MEASURING_SECONDS", 0.5)
    return folder


@pytest.fixture
def url(tmp_path):
    url = tmp_path / "d.zarr"
    dshuffle.create_dataset(url, keyed_regression(400))
    return url


@pytest.fixture
def few_changes(monkeypatch):
    """What would change a recommendation is sought in few steps, because that takes seconds."""
    monkeypatch.setattr(
        "dshuffle.planning.cost.FACTORS", (np.array([0.1, 0.01]), np.array([10.0, 100.0])), raising=False
    )
