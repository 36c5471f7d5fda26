"""The cache partition against a dictionary, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.rows import RowLayout, checksum_rows

from ..conftest import at_most


def layout_of(nbytes: int) -> RowLayout:
    return RowLayout.of({"x": (np.dtype("u1"), (nbytes,))})


class Truth:
    """What the store holds."""

    def __init__(self, n_samples: int, nbytes: int, seed: int = 0) -> None:
        self.rows = np.random.default_rng(seed).integers(0, 256, (n_samples, nbytes), dtype=np.uint8)
        self.checksums = checksum_rows(self.rows, np.arange(n_samples))


def packed(cache: CachePartition, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, checksums = cache.layout.empty(len(sample_ids)), np.empty(len(sample_ids), np.uint32)
    cache.pack(sample_ids, rows, checksums)
    return rows, checksums


def check(cache: CachePartition, truth: Truth, held: set[int], rng: np.random.Generator) -> None:
    """The partition holds exactly these samples, with the store's bytes and checksums."""
    assert cache.index.sample_ids.tolist() == sorted(held)
    assert len(set(cache.index.slots.tolist())) == len(held)
    sample_ids = rng.permutation(np.array(sorted(held), np.int64))
    rows, checksums = packed(cache, sample_ids)
    np.testing.assert_array_equal(rows, truth.rows[sample_ids])
    np.testing.assert_array_equal(checksums, truth.checksums[sample_ids])


def loaded(nbytes: int = 12, capacity: int = 6, incoming: int = 3) -> tuple[CachePartition, Truth]:
    """A partition that holds samples 0 to ``capacity``."""
    truth = Truth(40, nbytes)
    cache = CachePartition(layout_of(nbytes), capacity=capacity, incoming=incoming)
    held = np.arange(capacity)
    cache.unpack(held, cache.reserve(held), truth.rows[held], truth.checksums[held])
    cache.commit(cache.prepare(held))
    return cache, truth


@at_most(60)
@given(nbytes=st.sampled_from([1, 3, 8, 20, 33, 100_000]), seed=st.integers(0, 2**32), n_epochs=st.integers(1, 12))
def test_many_epochs_against_a_set(nbytes: int, seed: int, n_epochs: int) -> None:
    rng = np.random.default_rng(seed)
    n_samples = int(rng.integers(1, 40 if nbytes < 1000 else 8))
    truth = Truth(n_samples, nbytes, seed)
    capacity, max_incoming = int(rng.integers(1, n_samples + 1)), int(rng.integers(0, n_samples + 1))
    cache = CachePartition(layout_of(nbytes), capacity=capacity, incoming=max_incoming)
    held: set[int] = set()
    for _ in range(n_epochs):
        for aborted in [True] * int(rng.integers(0, 3)) + [False]:
            missing = rng.permutation(np.setdiff1d(np.arange(n_samples), list(held)))
            incoming = missing[: rng.integers(0, min(len(missing), max_incoming) + 1)]
            slots = cache.reserve(incoming)
            assert len(set(slots.tolist())) == len(incoming)
            assert not set(slots.tolist()) & set(cache.index.slots.tolist()), "a slot of the present epoch"
            assert all(0 <= slot < len(cache.rows) for slot in slots)
            n_read = int(rng.integers(0, len(incoming) + 1))  # some from the store, the others from peers
            if aborted:
                n_read, incoming, slots = 0, incoming[::2], slots[::2]
            cache.rows[slots[:n_read]] = truth.rows[incoming[:n_read]]
            cache.add_checksums(incoming[:n_read], slots[:n_read])
            others = incoming[n_read:]
            cache.unpack(others, slots[n_read:], truth.rows[others], truth.checksums[others])
            check(cache, truth, held, rng)
        n_kept = min(len(held), capacity - min(capacity, len(incoming)))
        keep = {*rng.permutation(sorted(held))[:n_kept].tolist(), *incoming[:capacity].tolist()}
        swap = cache.prepare(np.array(sorted(keep), np.int64))
        check(cache, truth, held, rng)  # until the commit, training sees the epoch before
        cache.commit(swap)
        held = keep
        check(cache, truth, held, rng)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    cache, truth = loaded()
    slots = cache.reserve(np.array([30, 20]))
    with pytest.raises(ExchangeError, match="4 incoming rows do not fit into 3 free slots"):
        cache.reserve(np.arange(10, 14))
    cache.unpack(np.array([30, 20]), slots, truth.rows[[30, 20]], truth.checksums[[30, 20]])
    cache.commit(cache.prepare(np.array([0, 3, 20, 30])))
    check(cache, truth, {0, 3, 20, 30}, np.random.default_rng(0))


@pytest.mark.parametrize("wanted", [[3, 17, 2], [17], [-1, 4], [0, 6, 99]])
def test_a_sample_that_is_not_held_is_named(wanted: list[int]) -> None:
    cache, _ = loaded()
    first = next(sample for sample in wanted if not 0 <= sample < 6)
    with pytest.raises(ExchangeError, match=rf"sample {first} is not in this cache partition \(6 samples\)"):
        packed(cache, np.array(wanted))


@pytest.mark.parametrize("kept", [[1, 9], [9], [-3, 1]])
def test_a_commit_cannot_keep_what_is_not_here(kept: list[int]) -> None:
    cache, truth = loaded()
    bad = next(sample for sample in kept if sample != 1)
    with pytest.raises(ExchangeError, match=f"sample {bad} must be kept, but is neither held nor incoming"):
        cache.prepare(np.array(kept))
    check(cache, truth, set(range(6)), np.random.default_rng(0))


class TestWhatArrives:
    """Damaged messages name a sample and leave the present epoch alone."""

    sample_ids = np.array([20, 10, 30])

    def check_refused(self, error: type[Exception], words: str, rows: np.ndarray, checksums: np.ndarray) -> None:
        cache, truth = loaded()
        slots = cache.reserve(self.sample_ids)
        with pytest.raises(error, match=words):
            cache.unpack(self.sample_ids, slots, rows, checksums)
        check(cache, truth, set(range(6)), np.random.default_rng(0))
        # The right message is taken afterwards.
        cache.unpack(self.sample_ids, slots, truth.rows[self.sample_ids], truth.checksums[self.sample_ids])
        cache.commit(cache.prepare(np.sort(self.sample_ids)))
        check(cache, truth, set(self.sample_ids.tolist()), np.random.default_rng(0))

    @pytest.mark.parametrize("bad", [0, 1, 2])
    @pytest.mark.parametrize("byte", [0, 7, 11])
    def test_a_flipped_bit(self, bad: int, byte: int) -> None:
        truth = Truth(40, 12)
        rows = truth.rows[self.sample_ids]
        rows[bad, byte] ^= 1
        sample = self.sample_ids[bad]
        words = f"the row of sample {sample} arrived corrupted"
        self.check_refused(ChecksumMismatch, words, rows, truth.checksums[self.sample_ids])

    def test_a_flipped_bit_of_a_checksum(self) -> None:
        truth = Truth(40, 12)
        checksums = truth.checksums[self.sample_ids] ^ np.array([0, 0, 1 << 31], np.uint32)
        self.check_refused(ChecksumMismatch, "sample 30", truth.rows[self.sample_ids], checksums)

    def test_the_right_row_of_another_sample(self) -> None:
        truth, others = Truth(40, 12), np.array([20, 11, 30])
        self.check_refused(ChecksumMismatch, "sample 10", truth.rows[others], truth.checksums[others])

    @pytest.mark.parametrize(
        ("n_rows", "nbytes", "n_checksums"), [(2, 12, 2), (4, 12, 4), (3, 12, 2), (3, 16, 3), (3, 0, 3), (0, 12, 0)]
    )
    def test_another_shape(self, n_rows: int, nbytes: int, n_checksums: int) -> None:
        rows, checksums = np.zeros((n_rows, nbytes), np.uint8), np.zeros(n_checksums, np.uint32)
        cache, truth = loaded()
        slots = cache.reserve(self.sample_ids)
        words = rf"rows \({n_rows}, {nbytes}\) and checksums \({n_checksums},\); 3 rows of 12 bytes were expected"
        with pytest.raises(ExchangeError, match=words):
            cache.unpack(self.sample_ids, slots, rows, checksums)
        check(cache, truth, set(range(6)), np.random.default_rng(0))
