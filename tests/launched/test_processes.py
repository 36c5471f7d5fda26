"""Ranks that are processes of their own: exactly once, and what happens to the others when one ends."""

from __future__ import annotations

import re
import signal
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
    while not loader._rank.job._failure:
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
