"""Ranks that are processes of their own: exactly once, and what happens to the others when one ends."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter

import numpy as np
import pytest

SCRIPT = """
import os, sys, time
import numpy as np
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
                seen.append(ids)
                if action != "none":
                    time.sleep(0.05)
                if (epoch.number, number, loader.rank) == (1, 2, rank) and not os.path.exists(f"{folder}/acted"):
                    act()
            np.save(f"{folder}/{epoch.number}-{loader.rank}.npy", np.concatenate(seen))
finally:
    with open(f"{folder}/ended-{os.environ['RANK']}", "w") as file:
        file.write(str(time.time()))
"""


def counts(folder, epoch):
    return Counter(np.concatenate([np.load(path) for path in folder.glob(f"{epoch}-*.npy")]).tolist())


def seconds_between(folder, rank):
    return float((folder / f"ended-{rank}").read_text()) - float((folder / "acted").read_text())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_two_processes(in_processes, store, folder):
    codes, errors = in_processes(SCRIPT, store, folder, "none", 0, 2).end()
    assert codes == [0, 0], errors
    for epoch in range(2):
        assert counts(folder, epoch) == Counter(range(103))


@pytest.mark.slow
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
    for other in range(3):
        if other == rank:
            assert codes[other] == code
        else:
            assert codes[other] == 1, errors[other]
            assert re.search(words, errors[other]), errors[other]
            assert seconds_between(folder, other) < 15
    # Another job of two ranks goes on, with the epoch that has not ended.
    assert counts(folder, 0) == Counter(range(103))

    def loop(loader):
        return {epoch.number: np.concatenate([ids for ids, _ in epoch]) for epoch in loader.epochs(3)}

    samples = in_threads(2, loop, checkpoint=f"{folder}/run.json")
    assert [set(of_rank) for of_rank in samples] == [{1, 2}] * 2
    for epoch in (1, 2):
        assert Counter(np.concatenate([of_rank[epoch] for of_rank in samples]).tolist()) == Counter(range(103))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_rank_0_opens_the_session(in_processes, store, folder):
    """All ranks have come, and the session must not wait for the one that has gone."""
    script = """
import os, signal, sys, time
import dshuffle
import dshuffle.launched.loader as module

url, folder = sys.argv[1:]

class LateSession(module.JobSession):
    def __init__(self, *arguments):
        open(f"{folder}/opens", "w").close()
        while loader._process.job.failure is None:
            time.sleep(0.05)
        super().__init__(*arguments)

module.JobSession = LateSession
with dshuffle.spmd(url, batch_size=8) as loader:
    if loader.rank == 2:
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


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_all_ranks(in_processes, store, folder):
    """A terminal sends SIGINT to all of them."""
    ranks = in_processes(SCRIPT, store, folder, "wait", 0, 100)
    end = time.monotonic() + 60
    while not (folder / "0-0.npy").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    for process in ranks.processes:
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    codes, errors = ranks.end()
    assert time.monotonic() - began < 15
    assert set(codes) <= {-signal.SIGINT, 1}, errors
    assert -signal.SIGINT in codes


@pytest.mark.slow
def test_the_worker_is_not_held_up(in_processes, store, tmp_path):
    """Imports happen before the event loop runs, and a loop in Python lets it run beside it.

    Measured: the longest time in which a callback of the event loop that is due every 20 ms did not run.
    """
    script = """
import asyncio, sys, time
import numpy as np
import dshuffle

lags = []

async def watch():
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        lags.append(time.monotonic() - began - 0.02)

with dshuffle.spmd(sys.argv[1], batch_size=8) as loader:
    loader._process.call(lambda: asyncio.ensure_future(watch()))
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


@pytest.mark.slow
def test_the_first_batch_takes_a_second(in_processes, store):
    """In processor time, of which most is numba, once kernels are compiled: 0.9 s on each rank."""
    in_processes(START, store).end()
    codes, errors = in_processes(START, store).end()
    assert codes == [0, 0], errors
    for error in errors:
        assert float(error.splitlines()[-1]) < 2.7, error
