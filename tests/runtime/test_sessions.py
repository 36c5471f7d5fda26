"""Several sessions on one cluster, workers that come and go between sessions, and what the scheduler has to do."""

from __future__ import annotations

import gc
import time
import weakref
from itertools import zip_longest

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.runtime.worker.session import WorkerSession

pytestmark = pytest.mark.slow  # real clusters


def test_two_at_once(threads, tmp_path, small, check_ids, sessions_left):
    other = create_dataset(str(tmp_path / "other.zarr"), {"y": np.arange(777)})
    with (
        Shuffler(threads, small, delivery="peer") as first,
        Shuffler(threads, other, delivery="server", assignment="partial:0.5") as second,
    ):
        assert sessions_left(threads) == (2, 10)
        for ours, theirs in zip_longest(first.epochs(4), second.epochs(6)):
            epochs = {1000: ours, 777: theirs}
            submitted = {size: epoch.map(check_ids) for size, epoch in epochs.items() if epoch is not None}
            for n_samples, futures in submitted.items():
                assert np.array_equal(np.sort(np.concatenate(threads.gather(futures))), np.arange(n_samples))
        assert (len(first.records), len(second.records)) == (4, 6)
        first.close()
        assert sessions_left(threads) == (1, 5)
        for epoch in second.epochs(1):
            assert sum(threads.gather(epoch.map(len))) == 777
    assert sessions_left(threads) == (0, 0)


def test_another_client_may_be_the_current_one(threads, cluster_of, small):
    """Dask's own wait() would take the client that was made last, and wait on the wrong event loop."""

    def one_raises(partition):
        time.sleep(0.2 * partition.rank)
        if partition.rank == 0:
            raise ZeroDivisionError

    with Shuffler(threads, small) as shuffler, cluster_of({}) as cluster, Client(cluster):
        for epoch in shuffler.epochs(2):
            futures = epoch.map(one_raises)
            with pytest.raises(ZeroDivisionError):
                threads.gather(futures)  # at once, while the others still train
            epoch.accept(futures)
    assert all(record.training_seconds >= 0.8 for record in shuffler.records)


def test_closing_frees_all_and_may_be_repeated(threads, small, check_ids, sessions_left, monkeypatch):
    sessions = weakref.WeakSet()
    opened = WorkerSession.__init__

    def noted(self, *args, **kwargs):
        opened(self, *args, **kwargs)
        sessions.add(self)

    monkeypatch.setattr(WorkerSession, "__init__", noted)
    shuffler = Shuffler(threads, small)
    for epoch in shuffler.epochs(3):
        threads.gather(epoch.map(check_ids))
    assert len(sessions) == 5
    shuffler.close()
    shuffler.close()
    assert sessions_left(threads) == (0, 0)
    del epoch
    gc.collect()
    assert not sessions  # and with them their rows
