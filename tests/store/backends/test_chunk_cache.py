"""The chunk cache: hits in proportion to its size, nothing else changes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import CorruptChunk, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, verify_dataset

X = np.arange(600.0).reshape(100, 6)
CHUNK = 5 * 6 * 8 + 4


@pytest.mark.parametrize(("chunks_kept", "hits"), [(0, 0), (7, 7), (20, 20), (99, 20)])
def test_hits_are_those_of_its_size(tmp_path: Path, chunks_kept: int, hits: int) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5)
    dataset = open_dataset(tmp_path / "d", chunk_cache=chunks_kept * CHUNK + 3)
    rng = np.random.default_rng(0)
    for epoch in range(3):
        before = dataset.traffic
        ids = rng.permutation(100)
        np.testing.assert_array_equal(dataset.read_rows(ids)["x"], X[ids])
        cost = dataset.traffic - before
        assert cost.cache_hits == (hits if epoch else 0)
        assert cost.requests == 20 - cost.cache_hits
        assert cost.fetched_bytes == cost.requests * CHUNK


def test_it_travels_with_the_dataset() -> None:
    create_dataset("memory://cached", {"x": X}, chunk_rows=5, overwrite=True)
    there = pickle.loads(pickle.dumps(open_dataset("memory://cached", chunk_cache="1 MiB")))
    there.read_rows([0])
    there.read_rows([1])
    assert (there.traffic.requests, there.traffic.cache_hits) == (1, 1)


def test_a_damaged_chunk_does_not_stay(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5)
    path = tmp_path / "d" / "x" / "c" / "3" / "0"
    good = path.read_bytes()
    path.write_bytes(b"x" + good[1:])
    dataset = open_dataset(tmp_path / "d", chunk_cache="1 MiB")
    with pytest.raises(CorruptChunk, match="samples 15 to 19"):
        dataset.read_rows(np.arange(100))
    path.write_bytes(good)
    np.testing.assert_array_equal(dataset.read_rows(np.arange(100))["x"], X)
    # What is kept in memory says nothing about what is stored.
    path.write_bytes(b"x" + good[1:])
    np.testing.assert_array_equal(dataset.read_rows([15])["x"], X[[15]])
    assert len(verify_dataset(dataset).bad) == 1


@pytest.mark.parametrize("size", [-1, "much", True, 2.5j])
def test_bad_sizes(size: Any) -> None:
    with pytest.raises(InvalidParameter, match="chunk_cache="):
        open_dataset("memory://cached", chunk_cache=size)
