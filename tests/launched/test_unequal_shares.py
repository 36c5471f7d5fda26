"""A script with given shares: batches in proportion, equally many on all ranks, and every sample once."""

from __future__ import annotations

import json
from collections import Counter

import pytest

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
    errors = in_threads(2, sizes_and_samples, shares=[3, 1], mode="drop")
    assert any(isinstance(error, InvalidParameter) for error in errors)
    for error in errors:  # a rank may hear of the other one's before it has its own
        assert "mode='drop' is not allowed; it must be 'uneven' with unequal shares" in str(error)


@pytest.mark.parametrize("given_as", ["state", "checkpoint"])
def test_a_state_with_measured_shares(in_threads, tmp_path, given_as):
    """A session of a cluster has measured them. A job cannot, and goes on if other shares are given."""
    states = in_threads(2, lambda loader: loader.state_dict() if loader.rank == 0 else None)
    state = {**states[0], "choices": {**states[0]["choices"], "shares": "measured"}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(state))

    def resumed(loader):
        if given_as == "state":
            loader.load_state_dict(state)
        return sizes_and_samples(loader)

    options = {"checkpoint": path} if given_as == "checkpoint" else {}
    errors = in_threads(2, resumed, batch_size=20, **options)
    assert all("shares='measured' is not allowed" in str(error) for error in errors)
    assert "Give 'even', or numbers, one for each rank" in str(errors[0])
    epochs = in_threads(2, resumed, batch_size=20, shares="even", **options)
    for (_, samples), (_, other_samples) in zip(*epochs, strict=True):
        assert Counter(samples + other_samples) == Counter(range(SAMPLES))
