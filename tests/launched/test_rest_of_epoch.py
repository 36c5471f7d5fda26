"""The batches of an epoch that another job has begun, when few samples are left."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest

from dshuffle.errors import InvalidParameter, PeerFailed
from dshuffle.launched.epoch_batches import batching_of

SAMPLES = 103


@dataclass
class Share:
    """What is left of a rank's partition."""

    size: int
    shares: tuple[int, int]
    rank: int = 0
    epoch: int = 3
    unequal: bool = False

    def __len__(self):
        return self.size


def batches(sizes, batch_size, mode):
    """The positions of the batches of each rank."""
    shares = min(sizes), max(sizes)
    batchings = [batching_of(Share(size, shares), batch_size, mode, is_rest=True) for size in sizes]
    return [[batching.positions(number).tolist() for number in range(len(batching))] for batching in batchings]


RESTS = [(largest, smallest) for largest in range(1, 30) for smallest in range(1, largest + 1)]


@pytest.mark.parametrize("mode", ["uneven", "pad"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_all_that_is_left_is_trained_on(batch_size, mode, caplog):
    for sizes in RESTS:
        caplog.clear()
        ranks = batches(sizes, batch_size, mode)
        assert len(ranks[0]) == len(ranks[1]) > 0
        for size, own in zip(sizes, ranks, strict=True):
            counts = Counter(itertools.chain.from_iterable(own))
            assert set(counts) == set(range(size))
            if mode == "uneven":
                assert set(counts.values()) == {1}
                assert all(own), "no batch is empty"
            else:
                assert {len(batch) for batch in own} == {batch_size}
        is_large = max(len(batch) for batch in itertools.chain(*ranks)) > batch_size
        assert bool(caplog.records) == is_large, "a batch larger than batch_size is announced, and nothing else"


def test_a_batch_above_batch_size_is_announced_once(caplog):
    for rank in range(3):
        assert len(batching_of(Share(40, (1, 40), rank), 8, "uneven", is_rest=True)) == 1
    [record] = caplog.records
    assert "epoch 3 have up to 40 samples, although batch_size=8" in record.getMessage()


@pytest.mark.parametrize("mode", ["uneven", "pad"])
@pytest.mark.parametrize("size", [0, 3])
def test_a_rank_without_samples_is_an_error_on_all_ranks(size, mode):
    with pytest.raises(InvalidParameter) as error:
        batching_of(Share(size, (0, 3)), 8, mode, is_rest=True)
    assert "world_size is not allowed: few samples of epoch 3 are left: 3 for one rank, and none" in str(error.value)
    assert "Finish this epoch with fewer ranks" in str(error.value)


def test_without_samples_there_are_no_batches():
    assert batches((0, 0), 8, "uneven") == batches((3, 0), 8, "drop") == [[], []]


def ids_of(batches):
    return list(itertools.chain.from_iterable(ids.tolist() for ids, _ in batches))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n_ranks"), [("pad", 2), ("uneven", 20)])
def test_one_rank_finishes_what_several_cannot(in_threads, tmp_path, mode, n_ranks):
    options = {"checkpoint": tmp_path / "run.json", "batch_size": 17, "mode": mode}

    def stops(loader):
        epoch = next(loader.epochs(2))
        return ids_of(itertools.islice(epoch, len(epoch) - 1))

    first = in_threads(2, stops, **options)

    def goes_on(loader):
        return [(epoch.number, ids_of(epoch)) for epoch in loader.epochs(1)]

    errors = in_threads(n_ranks, goes_on, **options)
    assert {type(error) for error in errors} <= {InvalidParameter, PeerFailed}
    assert all("Finish this epoch with fewer ranks" in str(error) for error in errors)
    [[(number, rest)]] = in_threads(1, goes_on, **options)
    assert number == 0
    counts = Counter(itertools.chain(*first, set(rest)))
    assert counts == Counter(range(SAMPLES))
    if mode == "uneven":
        assert len(rest) == len(set(rest))
