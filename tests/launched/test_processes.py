"""Ranks that are processes of their own: exactly once, and what happens to the others when one ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from .conftest import ONCE, all_epochs, counts, values

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys, time
import dshuffle

url, folder, action, rank, epochs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])

def act():
    with open(f"{folder}/acted", "w") as file:
        file.write(str(time.time()))
    if action.startswith("SIG"):
        import signal
        os.kill(os.getpid(), getattr(signal, action))
    elif action == "raise":
        raise ValueError("a bug")
    elif action == "exit":
        sys.exit(7)

try:
    with dshuffle.spmd(url, batch_size=8, checkpoint=f"{folder}/run.json") as loader:
        for epoch in loader.epochs(epochs):
            seen = []
            for number, (ids, x) in enumerate(epoch):
                assert (x == ids[:, None]).all()
                seen += ids.tolist()
                if action != "none":
                    time.sleep(0.05)
                if (epoch.number, number, loader.rank) == (1, 2, rank) and not os.path.exists(f"{folder}/acted"):
                    act()
            with open(f"{folder}/{epoch.number}-{loader.rank}", "w") as file:
                json.dump({epoch.number: seen}, file)
finally:
    with open(f"{folder}/ended-{os.environ['RANK']}", "w") as file:
        file.write(str(time.time()))
"""


def counts_in(folder, epoch):
    texts = [path.read_text() for path in folder.glob(f"{epoch}-*")]
    return Counter(int(sample) for text in texts for sample in re.findall(r"\d+", text.partition(":")[2]))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_two_processes(in_processes, store, folder):
    codes, errors = in_processes(SCRIPT, store, folder, "none", 0, 2).end()
    assert codes == [0, 0], errors
    for epoch in range(2):
        assert counts_in(folder, epoch) == ONCE


@pytest.mark.parametrize(
    ("action", "rank", "code", "words"),
    [
        ("SIGKILL", 0, -signal.SIGKILL, "WorkerLost: rank 0.* was lost"),
        ("SIGTERM", 1, -signal.SIGTERM, "WorkerLost: rank 1 of 3 was lost"),
        ("SIGINT", 0, -signal.SIGINT, "PeerFailed: rank 0 of 3 has failed: KeyboardInterrupt"),
        ("raise", 0, 1, "PeerFailed: rank 0 of 3 has failed: ValueError: a bug"),
        ("exit", 1, 7, "PeerFailed: rank 1 of 3 has failed: SystemExit: 7"),
    ],
)
def test_one_rank_ends_and_the_job_resumes(in_processes, in_threads, store, folder, rank, action, code, words):
    codes, errors = in_processes(SCRIPT, store, folder, action, rank, 3, n_ranks=3).end()
    assert codes.pop(rank) == code
    assert codes == [1, 1], errors
    for other in {0, 1, 2} - {rank}:
        assert re.search(words, errors[other]), errors[other]
        assert float((folder / f"ended-{other}").read_text()) - float((folder / "acted").read_text()) < 15
    # Another job of two ranks goes on, with the epoch that has not ended.
    assert counts_in(folder, 0) == ONCE
    samples = values(in_threads(2, all_epochs(3), checkpoint=f"{folder}/run.json"))
    assert [set(of_rank) for of_rank in samples] == [{1, 2}] * 2
    assert [counts(samples, epoch) for epoch in (1, 2)] == [ONCE] * 2


def test_a_rank_that_is_lost_while_rank_0_opens_the_session(in_processes, store, folder):
    """All ranks have come, and the session must not wait for the one that has gone."""
    script = """
import os, signal, sys, threading, time
import dshuffle
import dshuffle.launched.loader as module

url, folder = sys.argv[1:]

def late_client(*arguments, **options):
    open(f"{folder}/opens", "w").close()
    while loader._rank.job.failure is None:
        time.sleep(0.05)
    return client(*arguments, **options)

client, module.Client = module.Client, late_client
with dshuffle.spmd(url, batch_size=8) as loader:
    if loader.rank == 2:
        threading.Thread(target=len, args=(loader,), daemon=True).start()  # all ranks open the session together
        while not os.path.exists(f"{folder}/opens"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    for epoch in loader.epochs(1):
        pass
"""
    codes, errors = in_processes(script, store, folder, n_ranks=3).end()
    assert codes == [1, 1, -signal.SIGKILL], errors
    for error in errors[:2]:
        assert "WorkerLost: rank 2 of 3 was lost" in error


def test_ctrl_c_in_a_terminal_ends_all_ranks(in_processes, store, folder):
    """A terminal sends SIGINT to all of them."""
    ranks = in_processes(SCRIPT, store, folder, "wait", 0, 100)
    end = time.monotonic() + 60
    while not (folder / "0-0").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    codes, errors = ranks.end()
    assert time.monotonic() - began < 15
    assert set(codes) <= {-signal.SIGINT, 1}, errors
    assert -signal.SIGINT in codes


TRAIN = """
import os, sys, time
import dshuffle

rank = int(os.environ["RANK"])
given = []
with dshuffle.spmd(sys.argv[1], batch_size=8, **OPTIONS) as loader:
    for epoch in loader.epochs(2):
        for number, (ids, x) in enumerate(epoch, 1):
            given += ids.tolist()
            STEP
print("given", len(given), file=sys.stderr)
"""


def script(step: str, options: str = "{}") -> str:
    return TRAIN.replace("STEP", step).replace("OPTIONS", options)


def test_a_rank_of_another_dataset(in_processes, store, tmp_path):
    """A trap for scripts with one shard for each rank. The error of closing does not hide the reason.

    Dask raises this error if it closes a connection twice that is being opened.
    """
    (tmp_path / "shard").mkdir()
    make = "import numpy as np; dshuffle.create_dataset(url, {'id': np.arange(50), 'x': np.zeros(50)})"
    start = f"""
import distributed, dshuffle, os, sys

async def close(worker, **options):
    raise RuntimeError("Cannot change state of expiring Timeout")

distributed.Worker.close = close
if os.environ['RANK'] == '1':
    url = sys.argv[1] = sys.argv[2]
    {make}
"""
    codes, errors = in_processes(start + script("pass"), store, tmp_path / "shard" / "1.zarr").end()
    assert codes == [1, 1], errors
    for error in errors:
        assert re.search(r"rank 1 has dataset='.*1\.zarr', and rank 0 has '.*d\.zarr'", error), error
        assert "expiring" not in error


def test_two_loaders_at_once(in_processes, store):
    step = """
            with dshuffle.spmd(sys.argv[1], batch_size=50) as validation:
                for part in validation.epochs(1):
                    assert sum(len(ids) for ids, _ in part) >= 51
            break
    """
    codes, errors = in_processes(script(step), store).end()
    assert codes == [0, 0], errors
    step = step.replace("batch_size=50", "batch_size=50, port=int(sys.argv[2])")
    codes, errors = in_processes(script(step, "{'port': int(sys.argv[2])}"), store, 19_990).end()
    assert codes == [1, 1], errors
    for error in errors:
        assert "port=19990 is not allowed; it must be another one: a loader of this process is open on it" in error


MULTIPROCESSING = """
import multiprocessing, sys
import dshuffle

def rank(number, sizes):
    with dshuffle.spmd(sys.argv[1], batch_size=8, **sizes(number)) as loader:
        for epoch in loader.epochs(1):
            print(f"given {sum(len(ids) for ids, _ in epoch)}\\n", end="", flush=True)

def none(number):
    return {}

def both(number):
    return {"rank": number, "world_size": 2, "port": int(sys.argv[2])}

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank, args=(number, globals()[sys.argv[3]])) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode for process in processes))
"""


@pytest.mark.parametrize("gives", ["none", "both"])
def test_processes_that_multiprocessing_starts(tmp_path, store, free_port, gives):
    (tmp_path / "script.py").write_text(MULTIPROCESSING)
    names = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "script.py", store, str(free_port), gives]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    if gives == "both":
        assert sorted(ran.stdout.split("\n")[:2]) == ["given 51", "given 52"], ran.stderr
        return
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("rank is not allowed: multiprocessing has started this process without one") == 2


def test_a_forked_process_gets_no_batches_and_does_not_hang(in_processes, store):
    """As in a DataLoader with workers, which Linux forks: each of them would give every sample."""
    step = """
            if number == 2:
                child = os.fork()
                if child == 0:
                    try:
                        for batch in epoch:
                            os._exit(2)
                    except dshuffle.errors.InvalidParameter as error:
                        assert "num_workers" in str(error)
                        sys.exit(7)  # leaves the with statement
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == 7
    """
    codes, errors = in_processes(script(step), store).end()
    assert codes == [0, 0], errors
    assert sorted(error.split()[-1] for error in errors) == ["102", "104"]


def test_batches_that_a_thread_takes_ahead(in_processes, store, tmp_path):
    """Each rank has asked for 6 batches and has trained on 4, in the position and when the loop ends."""
    ahead = """
import os, sys
import dshuffle

seen = []
with dshuffle.spmd(sys.argv[1], batch_size=8, checkpoint=sys.argv[2]) as loader:
    for epoch in loader.epochs(1):
        epoch.mark_trained(0)
        batches = iter(epoch)
        if len(epoch) == 7:
            taken = [next(batches)[0].tolist() for _ in range(6)]
            for number in range(4):
                seen += taken[number]
                epoch.mark_trained(number + 1)
            break
        for number, (ids, x) in enumerate(batches, 1):
            seen += ids.tolist()
            epoch.mark_trained(number)
open(f"{sys.argv[3]}/{loader.rank}", "a").write(" ".join(map(str, seen)) + " ")
"""
    for _ in range(2):
        codes, errors = in_processes(ahead, store, tmp_path / "run.json", tmp_path).end()
        assert codes == [0, 0], errors
    seen = " ".join((tmp_path / str(rank)).read_text() for rank in range(2)).split()
    assert Counter(map(int, seen)) == ONCE


def test_the_worker_is_not_held_up(in_processes, store):
    """Imports happen before the event loop runs, and a loop in Python lets it run beside it.

    Measured: the longest time in which a callback of the event loop that is due every 20 ms did not run.
    """
    script = """
import asyncio, sys, time
import dshuffle

lags = []

async def watch():
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        lags.append(time.monotonic() - began - 0.02)

with dshuffle.spmd(sys.argv[1], batch_size=8) as loader:
    loader._rank.loop.add_callback(watch)
    for epoch in loader.epochs(3):
        for batch in epoch:
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                sum(range(1000))
assert len(lags) > 20
print(f"{max(lags):.3f}", file=sys.stderr)
"""
    codes, errors = in_processes(script, store).end()
    assert codes == [0, 0], errors
    for error in errors:
        assert float(error.split()[-1]) < 2, "a heartbeat may take 15 s, and a stall of this kind took 10 s"


START = """
import sys, time
import dshuffle
import dshuffle.launched.spmd

began = time.process_time()
with dshuffle.spmd(sys.argv[1], batch_size=8) as loader:
    for epoch in loader.epochs(1):
        for number, batch in enumerate(epoch):
            if not number:
                print(time.process_time() - began, file=sys.stderr)
"""


def test_the_first_batch_takes_a_second(in_processes, store):
    """In processor time, of which most is numba, once kernels are compiled: 0.9 s on each rank."""
    in_processes(START, store).end()
    codes, errors = in_processes(START, store).end()
    assert codes == [0, 0], errors
    for error in errors:
        assert float(error.splitlines()[-1]) < 2.7, error
