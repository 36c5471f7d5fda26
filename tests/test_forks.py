"""A process that was forked reads and writes datasets at once, whatever its parent did before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from dshuffle import create_dataset, open_dataset, shuffle_dataset, verify_dataset

from .conftest import in_a_fork

X = np.arange(2000.0).reshape(500, 4)


def uses(dataset, folder):
    """What one does with datasets."""
    ids = np.arange(500)

    def created():
        made = create_dataset(folder / "made", {"x": X}, chunk_rows=9, shard_rows=99, overwrite=True)
        return np.array_equal(made.read_rows(ids)["x"], X)

    def copied():
        return shuffle_dataset(dataset, folder / "copy", seed=1, overwrite=True).n_samples

    return {
        "a dataset that the parent opened": lambda: np.array_equal(dataset.read_rows(ids)["x"], X),
        "another one": lambda: np.array_equal(open_dataset(dataset.url).read_rows(ids)["x"], X),
        "views": lambda: dataset.windows({"x": [0, 1]}).select(ids[:400:7]).read_rows([3])["x"].shape,
        "a new one": created,
        "a shuffled copy": copied,
        "verification": lambda: verify_dataset(dataset).ok,
    }


def test_datasets_in_a_forked_process(tmp_path):
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    expected = {name: f"returned {use()}" for name, use in uses(dataset, tmp_path).items()}
    found = {name: in_a_fork(use) for name, use in uses(dataset, tmp_path).items()}
    assert found == expected


def test_a_fork_of_a_fork(tmp_path):
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    read = uses(dataset, tmp_path)["a dataset that the parent opened"]
    assert in_a_fork(lambda: (read(), in_a_fork(read))) == "returned (True, 'returned True')"


@pytest.mark.slow
def test_forks_while_other_threads_read(tmp_path):
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=7)
    read = uses(dataset, tmp_path)["a dataset that the parent opened"]
    ended = threading.Event()

    def reads():
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


SCRIPT = """
import os, signal, sys, warnings
import numpy as np
import dshuffle

def session(use, **options):
    from distributed import Client, LocalCluster
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        with Client(cluster) as client, dshuffle.Shuffler(client, "d", **options) as shuffler:
            return use(client, shuffler)

def fit():
    from dshuffle.training import Network, fit_synchronous_sgd
    options = {"epochs": 2, "batch_size": 8, "step": 0.01}
    history = session(lambda client, shuffler: fit_synchronous_sgd(shuffler, Network((4, 4, 2)), **options))
    assert len(history.points) == 2

def spmd():
    with dshuffle.spmd("d", batch_size=8, rank=0, world_size=1) as loader:
        assert [sum(len(y) for x, y in epoch) for epoch in loader.epochs(2)] == [500, 500]

def to_torch():
    def trained(partition):
        return sum(len(batch["y"]) for batch in partition.to_torch(8, mode="uneven"))
    assert session(lambda client, shuffler: client.gather(next(shuffler.epochs(1)).map(trained))) == [250, 250]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    x, y = np.arange(2000.0).reshape(500, 4) / 2000, np.arange(500) % 2
    dshuffle.create_dataset("d", {"x": x, "y": y}, chunk_rows=50).read_rows(np.arange(7))
    child = os.fork()
    if not child:
        signal.alarm(300)
        globals()[sys.argv[1]]()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("use", ["fit", "spmd"])
def test_what_uses_threads_and_loops_of_its_own_in_a_forked_process(tmp_path, use):
    """After a local read, in a process of its own: Dask itself does not work where a fork follows a cluster."""
    in_a_forked_process(tmp_path, use)


@pytest.mark.slow
def test_batches_of_pytorch_in_a_forked_process(torch, tmp_path):
    in_a_forked_process(tmp_path, "to_torch")


def in_a_forked_process(tmp_path, use):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", use]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
