"""A script with given shares: batches in proportion, equally many on all ranks, and every sample once."""

from __future__ import annotations

from collections import Counter

from dshuffle.errors import InvalidParameter

from .conftest import SAMPLES


def sizes_and_samples(loader):
    epochs = []
    for epoch in loader.epochs(2):
        batches = [ids.tolist() for ids, _ in epoch]
        epochs.append(([len(ids) for ids in batches], [sample for ids in batches for sample in ids]))
    return epochs


def test_batches_in_proportion(in_threads):
    fast, slow = in_threads(2, sizes_and_samples, shares=[3, 1], batch_size=20)
    for (sizes, samples), (slow_sizes, slow_samples) in zip(fast, slow, strict=True):
        assert Counter(samples + slow_samples) == Counter(range(SAMPLES))
        assert (len(samples), len(slow_samples)) == (77, 26)  # of 103, in proportion to 1000 and 333
        assert (sum(sizes), len(sizes)) == (77, 4)
        assert sorted(slow_sizes) == [6, 6, 7, 7]


def test_the_other_modes_are_refused(in_threads):
    for error in in_threads(2, sizes_and_samples, shares=[3, 1], mode="drop"):
        assert isinstance(error, InvalidParameter)
        assert "mode='drop' is not allowed; it must be 'uneven' with unequal shares" in str(error)
