"""The first epoch is read in pieces: a failure repeats one of them, and a session says how far it is."""

from __future__ import annotations

import logging
import threading
import time

import dask
import numpy as np
import pytest

from dshuffle import Shuffler
from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange import row_transport
from dshuffle.runtime.client import session_client
from dshuffle.store import Dataset

PIECES = 5
"""Of the partition of each of five workers."""


@pytest.fixture
def pieces(small, monkeypatch):
    """Cut what a worker reads into five pieces."""
    monkeypatch.setattr(row_transport, "STORE_BYTES", 200 // PIECES * small.row_nbytes)


@pytest.fixture
def reads(monkeypatch):
    """What is read from the store, and a function that is called before: piece -> None."""
    read_into, lock = Dataset.read_into, threading.Lock()
    seen, before = [], [lambda ids: None]

    def reading(self, rows, slots, ids, **options):
        if len(ids) > 3:  # three rows tell whether workers see the same dataset
            with lock:
                seen.append(np.array(ids))
            before[0](ids)
        read_into(self, rows, slots, ids, **options)

    monkeypatch.setattr(Dataset, "read_into", reading)
    return seen, before


def test_a_partition_is_read_in_pieces(threads, small, check_orders, pieces, reads):
    seen, _ = reads
    with Shuffler(threads, small) as shuffler:
        check_orders(shuffler, 2)
    assert [len(ids) for ids in seen] == [200 // PIECES] * 5 * PIECES
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(1000))


@pytest.mark.slow
def test_only_what_failed_is_read_again(threads, small, check_orders, pieces, reads):
    """As when a request fails for longer than the store repeats it."""
    seen, before = reads
    failures = []

    def fails_twice(ids):
        if 500 in ids and len(failures) < 2:
            failures.append(1)
            raise OSError("the store is away")

    before[0] = fails_twice
    with Shuffler(threads, small) as shuffler:
        check_orders(shuffler, 1)
        assert shuffler.records[0].run_id == 1  # and not another attempt of all workers
    assert len(failures) == 2
    assert len(seen) == 5 * PIECES + 2


@pytest.mark.slow
def test_what_has_arrived_is_kept_if_a_piece_cannot_be_read(threads, small, check_ids, pieces, reads):
    seen, before = reads
    away = [True]

    def fails(ids):
        if 500 in ids and away[0]:
            end = time.monotonic() + 20
            while len(seen) < 4 * PIECES + 1 and time.monotonic() < end:  # the other workers have begun all pieces
                time.sleep(0.01)
            time.sleep(0.3)
            raise OSError("the store is away")

    before[0] = fails
    with Shuffler(threads, small) as shuffler:
        epochs = shuffler.epochs(1)
        with pytest.raises(ExchangeError, match="the store is away"):
            next(epochs)
        first = len(seen)
        away[0] = False
        epoch = next(shuffler.epochs(1))
        samples = threads.gather(epoch.map(check_ids))
    assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(1000))
    again = np.concatenate(seen[first:])
    assert 500 in again
    [failing] = [own for own in samples if 500 in own]
    # On a busy machine, one of the others may have had a piece under way when the run ended.
    assert len(np.setdiff1d(again, failing)) <= 200 // PIECES


def test_a_chunk_that_is_damaged_is_not_read_again(threads, small, check_orders, pieces, reads):
    seen, before = reads

    def damaged(ids):
        if 500 in ids:
            raise DatasetError("a chunk is damaged")

    before[0] = damaged
    with Shuffler(threads, small) as shuffler, pytest.raises(ExchangeError, match="a chunk is damaged"):
        next(shuffler.epochs(1))
    assert sum(500 in ids for ids in seen) == 1


@pytest.mark.slow
def test_a_slow_load_says_how_far_it_is(threads, small, check_orders, pieces, reads, monkeypatch, caplog):
    _, before = reads
    release = threading.Event()
    slow = []

    def waits(ids):
        if 500 in ids:
            slow.append(len(ids))
            release.wait(30)

    before[0] = waits
    monkeypatch.setattr(session_client, "PATIENCE", 3.0)
    beat = dask.config.set({"dshuffle.heartbeat": "3s"})  # participants are asked every second
    with beat, Shuffler(threads, small) as shuffler, caplog.at_level(logging.WARNING):
        threading.Timer(5.0, release.set).start()
        check_orders(shuffler, 1)
    [line] = [record.message for record in caplog.records if "waiting for the samples of epoch 0" in record.message]
    assert " has " in line
    assert line.endswith("%")
