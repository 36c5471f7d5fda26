"""A process that was forked reads and writes datasets at once, whatever its parent did before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dshuffle import Dataset, create_dataset, open_dataset, shuffle_dataset, verify_dataset

from .conftest import in_a_fork

X = np.arange(2000.0).reshape(500, 4)


def uses(dataset: Dataset, folder: Path) -> dict[str, Callable[[], object]]:
    """What one does with datasets."""
    ids = np.arange(500)

    def created() -> bool:
        made = create_dataset(folder / "made", {"x": X}, chunk_rows=9, shard_rows=99, overwrite=True)
        return np.array_equal(made.read_rows(ids)["x"], X)

    def copied() -> object:
        return shuffle_dataset(dataset, folder / "copy", seed=1, overwrite=True).n_samples

    return {
        "a dataset that the parent opened": lambda: np.array_equal(dataset.read_rows(ids)["x"], X),
        "another one": lambda: np.array_equal(open_dataset(dataset.url).read_rows(ids)["x"], X),
        "views": lambda: dataset.windows({"x": [0, 1]}).select(ids[:400:7]).read_rows([3])["x"].shape,
        "a new one": created,
        "a shuffled copy": copied,
        "verification": lambda: verify_dataset(dataset).ok,
    }


def test_datasets_in_a_forked_process(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    expected = {name: f"returned {use()}" for name, use in uses(dataset, tmp_path).items()}
    found = {name: in_a_fork(use) for name, use in uses(dataset, tmp_path).items()}
    assert found == expected


def test_a_fork_of_a_fork(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    read = uses(dataset, tmp_path)["a dataset that the parent opened"]
    assert in_a_fork(lambda: (read(), in_a_fork(read))) == "returned (True, 'returned True')"


@pytest.mark.slow
def test_forks_while_other_threads_read(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    read = uses(dataset, tmp_path)["a dataset that the parent opened"]
    ended = threading.Event()

    def reads() -> None:
        while not ended.is_set():
            read()

    threads = [threading.Thread(target=reads) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [in_a_fork(read) for _ in range(20)] == ["returned True"] * 20
    finally:
        ended.set()
        for thread in threads:
            thread.join()
