"""Ranks of a job, as threads of this process or as processes of their own."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

import dshuffle

SAMPLES = 103
ONCE = Counter(range(SAMPLES))


def ids_of(batches):
    """The samples of some batches, whose rows must belong to them."""
    ids = []
    for number, x in batches:
        assert np.array_equal(x, np.repeat(number[:, None], 3, axis=1)), "rows belong to their ids"
        ids += number.tolist()
    return ids


def all_epochs(total):
    """A loop that returns the samples of its rank, by epoch."""
    return lambda loader: {epoch.number: ids_of(epoch) for epoch in loader.epochs(total)}


def stops_after(n_batches, *, in_epoch=0):
    """A loop that leaves an epoch after some batches, or if the number is negative, before as many."""

    def loop(loader):
        seen = {}
        for epoch in loader.epochs(in_epoch + 1):
            stop = n_batches % len(epoch) if epoch.number == in_epoch else None
            seen[epoch.number] = ids_of(itertools.islice(epoch, stop))
            if stop is not None:
                break
        return seen

    return loop


def values(results):
    """What the ranks have returned."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def counts(results, epoch):
    """How often each sample came in an epoch."""
    return Counter(itertools.chain.from_iterable(rank.get(epoch, []) for rank in results))


def torchrun(folder, script, *arguments, options=("--nproc-per-node", "2")):
    """Run a script under torchrun."""
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, "train.py"]
    command += map(str, arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=folder)


class Model:
    """A model that has seen some samples."""

    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.fixture
def free_port():
    """A port that is free now, and that Linux gives to no connection meanwhile."""
    for port in random.sample(range(10_000, 20_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.fixture
def store(tmp_path):
    """URL of a dataset whose rows say which samples they are."""
    url = str(tmp_path / "d.zarr")
    ids = np.arange(SAMPLES)
    dshuffle.create_dataset(url, {"id": ids, "x": np.repeat(ids[:, None], 3, axis=1).astype("f4")})
    return url


@pytest.fixture
def in_threads(store, free_port):
    """Run a function on the loader of every rank, in threads, and return what it returned or raised on each."""

    def run(n_ranks, loop, by_rank=None, **options):
        results: list[object] = [None] * n_ranks

        def rank_of(rank):
            own = {"dataset": store, "batch_size": 8, "timeout": 60, "port": free_port}
            own |= {**options, **(by_rank or {}).get(rank, {})}
            try:
                with dshuffle.spmd(rank=rank, world_size=n_ranks, **own) as loader:
                    results[rank] = loop(loader)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(n_ranks)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 120
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), f"a rank hangs: {results}"
        return results

    return run


class Ranks:
    """Processes of one script, as a launcher starts them."""

    def __init__(self, script, arguments, n_ranks, job):
        path = os.pathsep.join(filter(None, sys.path))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
        environment |= {"PYTHONPATH": path, "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *arguments]
        self.processes = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True, process_group=0
            )
            for rank in range(n_ranks)
        ]

    def end(self, seconds=100):
        """Wait for the ends of all ranks; their exit codes, and what they wrote to stderr. No process may be left."""
        end = time.monotonic() + seconds
        try:
            errors = [process.communicate(timeout=max(1, end - time.monotonic()))[1] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        for process in self.processes:  # each began a group, in which its children would be
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)
        return [process.returncode for process in self.processes], errors


@pytest.fixture
def in_processes(tmp_path, free_port):
    """Start a script as the ranks of a job."""
    started = []

    def start(script, *arguments, n_ranks=2):
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(script)
        started.append(Ranks(path, [str(argument) for argument in arguments], n_ranks, f"{free_port}{len(started)}"))
        return started[-1]

    yield start
    for ranks in started:
        for process in ranks.processes:
            process.kill()
            process.wait()
            process.stderr.close()
