"""Every sample is trained on by one rank once an epoch, by loops of ranks in threads; parameters of a job."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle.errors import InvalidParameter, PeerFailed

from .conftest import ONCE, all_epochs, counts, ids_of, values


@pytest.mark.parametrize(
    "assignment", ["global", *(pytest.param(name, marks=pytest.mark.slow) for name in ("partial:0.3", "chunks:10"))]
)
def test_every_sample_once_an_epoch(in_threads, assignment):
    results = values(in_threads(3, all_epochs(3), assignment=assignment, batch_size=5))
    assert [sorted(rank) for rank in results] == [[0, 1, 2]] * 3
    for epoch in range(3):
        assert counts(results, epoch) == ONCE
    assert results[0][0] != results[0][1]


@pytest.mark.slow
def test_ranks_are_those_of_a_session_on_as_many_workers(in_threads, store):
    results = values(in_threads(2, all_epochs(2), seed=7))
    with (
        Client(n_workers=2, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, store, seed=7) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            orders = client.gather(epoch.map(lambda partition: partition.sample_ids.tolist()))
            assert [rank[epoch.number] for rank in results] == orders


@pytest.mark.slow
def test_drop_and_pad_fill_all_batches(in_threads):
    def sizes(loader):
        return [[len(number) for number, _ in epoch] for epoch in loader.epochs(1)], len(loader)

    assert values(in_threads(2, sizes, mode="drop")) == [([[8] * 6], 6)] * 2
    assert values(in_threads(2, sizes, mode="pad")) == [([[8] * 7], 7)] * 2


def test_batches_in_proportion_to_given_shares(in_threads):
    def loop(loader):
        return [[ids.tolist() for ids, _ in epoch] for epoch in loader.epochs(2)]

    for fast, slow in zip(*values(in_threads(2, loop, shares=[3, 1], batch_size=20)), strict=True):
        assert Counter(itertools.chain(*fast, *slow)) == ONCE
        assert (sum(map(len, fast)), len(fast)) == (77, 4)  # of 103, in proportion to 1000 and 333
        assert sorted(map(len, slow)) == [6, 6, 7, 7]
    for error in in_threads(2, loop, shares=[3, 1], mode="drop"):  # one of them may be that of the other rank
        assert "mode='drop' is not allowed; it must be 'uneven' with unequal shares" in str(error)


def test_the_length_is_known_before_the_first_epoch(in_threads):
    def loop(loader):
        before = len(loader) if loader.rank == 0 else None
        return before, [(epoch.number, len(list(epoch))) for epoch in loader.epochs(2)], loader.next_epoch

    assert values(in_threads(2, loop)) == [(7, [(0, 7), (1, 7)], 2), (None, [(0, 7), (1, 7)], 2)]


@pytest.mark.parametrize("arrays", [None, ["x", "b"]])
def test_arrays_are_in_alphabetical_order_or_in_that_asked_for(tmp_path, arrays):
    """The order of a row's bytes is another one."""
    kinds = {"b": ((4,), bool), "x": ((4, 2), "f4"), "y": ((4,), "i8")}
    dataset = dshuffle.create_dataset(
        str(tmp_path / "three.zarr"), {"x": np.zeros((4, 2), "f4"), "y": np.arange(4), "b": np.zeros(4, bool)}
    )
    assert dataset.layout.names != ("b", "x", "y")
    with dshuffle.spmd(dataset, batch_size=4, rank=0, world_size=1, arrays=arrays) as loader:
        [batch] = next(loader.epochs(1))
    assert loader.names == tuple(arrays or kinds)
    assert [(array.shape, array.dtype) for array in batch] == [kinds[name] for name in loader.names]


@pytest.mark.parametrize(
    ("name", "first", "second"), [("batch_size", 8, 4), ("assignment", "local", "global"), ("dataset", None, None)]
)
def test_ranks_that_differ_are_refused(in_threads, store, tmp_path, name, first, second):
    """Another dataset is a trap for scripts with one shard for each rank."""
    if name == "dataset":
        first, second = store, str(tmp_path / "1.zarr")
        dshuffle.create_dataset(second, {"id": np.arange(50), "x": np.zeros(50)})
    errors = in_threads(2, len, by_rank={0: {name: first}, 1: {name: second}})
    if name == "dataset":
        first, second = (dshuffle.open_dataset(url).identity for url in (first, second))
    for error in errors:
        assert isinstance(error, PeerFailed)
        for rank, value in enumerate((first, second)):
            assert re.search(f"rank {rank} asks for .*{name}={value!r}", str(error)), error
        assert not error.transient


@pytest.mark.parametrize(("variables", "is_warned"), [({}, True), ({"RANK": "0", "WORLD_SIZE": "1"}, False)])
def test_a_process_without_a_launcher_is_the_only_rank(variables, is_warned, store, caplog, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with dshuffle.spmd(store, batch_size=8) as loader:
        assert (loader.rank, loader.world_size) == (0, 1)
        assert Counter(ids_of(next(loader.epochs(1)))) == ONCE
    assert ("the only rank" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_loss": "replace"}, "on_loss is not allowed"),
        ({"workers": ["0"]}, "workers is not allowed"),
        ({"shares": "measured"}, "a step of the script waits for other ranks. Give 'even', or numbers, one for each"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"mode": "half"}, "mode='half'"),
        ({"arrays": ["z"]}, "arrays=['z']"),
        ({"arrays": "x"}, "arrays='x'"),
        ({"timeout": 0}, "timeout=0"),
        ({"port": None}, "port=None is not allowed; it must be an integer if no launcher says"),
        ({"port": 70000}, "port=70000"),
        ({"rank": 2}, "rank=2 is not allowed; it must be below world_size=2"),
    ],
)
def test_bad_parameters(store, options, words):
    with pytest.raises(InvalidParameter) as error:
        dshuffle.spmd(store, **{"batch_size": 8, "rank": 0, "world_size": 2, "port": 1234, **options})
    assert words in str(error.value)


def test_a_device_without_torch(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    for name in ("device", "torch"):
        monkeypatch.delitem(sys.modules, f"dshuffle.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"PyTorch is not installed .*pip install 'dshuffle\[torch\]'.*whl/cpu"):
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=1, port=1234, device="cpu")


def test_an_unknown_parameter(store):
    with pytest.raises(TypeError, match="'asignment'"):
        dshuffle.spmd(store, batch_size=8, asignment="global")
