"""A shuffler belongs to the process that made it: it is not copied, and a forked process is told so at once."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError

from ..conftest import in_a_fork


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def dataset():
    return create_dataset("memory://one-process", {"x": np.arange(20.0)}, chunk_rows=5, overwrite=True)


@pytest.mark.parametrize("another", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_shuffler_is_not_copied(client, dataset, another):
    with Shuffler(client, dataset) as shuffler:
        [epoch] = shuffler.epochs(1)
        for value in (shuffler, [shuffler]) if another is not copy.copy else (shuffler,):
            with pytest.raises(TypeError, match=r"<Shuffler .*> cannot be copied or pickled: it owns an open session"):
                another(value)
        assert client.gather(epoch.map(len)) == [10, 10]  # no copy has closed the session


@pytest.mark.slow
def test_a_forked_process_is_told_at_once(client, dataset, tmp_path):
    place = tmp_path / "run.json"
    shuffler = Shuffler(client, dataset, checkpoint=place)
    epochs = shuffler.epochs(2)
    epoch = next(epochs)
    assert client.gather(epoch.map(len)) == [10, 10]

    def leaves():
        with shuffler:
            raise KeyboardInterrupt

    def dropped():
        shuffler.__del__()
        shuffler._file.release()
        return "quietly"

    bound = f"ClusterError: this Shuffler works only in process {os.getpid()}, which made it"
    calls = [
        lambda: next(epochs),
        lambda: shuffler.epochs(1),
        lambda: epoch.map(len),
        lambda: epoch.together(len),
        shuffler.state_dict,
        shuffler.look_up_members,
        shuffler.close,
    ]
    for number, call in enumerate(calls):
        assert in_a_fork(call).startswith(bound), number
    assert in_a_fork(leaves) == "KeyboardInterrupt: "
    assert in_a_fork(dropped) == "returned quietly"
    assert "<Shuffler" in in_a_fork(lambda: repr(shuffler))
    # Nothing of that has reached the session, or the lock of its checkpoint.
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.json.lock"]
    for epoch in epochs:
        assert client.gather(epoch.map(len)) == [10, 10]
    shuffler.close()
    assert sorted(os.listdir(tmp_path)) == ["run.json", "run.json.lock"]
    with pytest.raises(ClusterError, match="is closed"):
        shuffler.epochs(1)
