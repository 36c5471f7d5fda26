"""Ranks as processes: loops that leave apart, processes that are not ranks, and what a rank did not get."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_leaves_an_epoch_alone_ends_the_job(in_processes, store, tmp_path, rank):
    """The others are in the middle of the epoch, and may wait for it in a collective operation."""
    step = f"""
            if (rank, number, epoch.number) == ({rank}, 3, 0):
                open(sys.argv[2], "w").write(str(time.time()))
                break
            if number == 5:  # a collective operation, which ends when the other process has ended
                while True:
                    time.sleep(0.1)
                    loader._mailbox.check()
    """
    codes, errors = in_processes(script(step), store, tmp_path / "left").end()
    assert time.time() - float((tmp_path / "left").read_text()) < 30
    assert codes == [1, 1], errors
    for error in errors:
        assert f"rank {rank} of 2 has left its loop after epoch 0, of which it had 3 of 7 batches" in error
        assert "leave them at the same batch" in error


@pytest.mark.slow
def test_an_epoch_that_all_ranks_leave_early_is_said(in_processes, store):
    codes, errors = in_processes(script("if number == 3: break"), store).end()
    assert codes == [0, 0], errors
    for epoch in range(2):
        assert f"the loops of all ranks have left epoch {epoch} after 3 of its 7 batches" in errors[0]


@pytest.mark.slow
def test_a_rank_of_another_dataset(in_processes, store, tmp_path):
    """A trap for scripts with one shard for each rank."""
    (tmp_path / "shard").mkdir()
    make = "import numpy as np; dshuffle.create_dataset(url, {'id': np.arange(50), 'x': np.zeros(50)})"
    start = f"import dshuffle, os, sys\nif os.environ['RANK'] == '1':\n    url = sys.argv[1] = sys.argv[2]\n    {make}"
    codes, errors = in_processes(start + script("pass"), store, tmp_path / "shard" / "1.zarr").end()
    assert codes == [1, 1], errors
    for error in errors:
        assert re.search(r"rank 1 has dataset='.*1\.zarr', and rank 0 has '.*d\.zarr'", error), error


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_error_of_closing_does_not_hide_the_reason(in_processes, store):
    """Dask raises this if it closes a connection twice that is being opened."""
    broken = """
import distributed

async def close(worker, **options):
    raise RuntimeError("Cannot change state of expiring Timeout")

distributed.Worker.close = close
"""
    differs = script("pass").replace("batch_size=8", "batch_size=8 + 200 * rank")
    codes, errors = in_processes(broken + differs, store).end()
    assert codes == [1, 1], errors
    for error in errors:
        assert "rank 1 has batch_size=208, and rank 0 has 8" in error
        assert "expiring" not in error


MULTIPROCESSING = """
import multiprocessing, sys
import dshuffle

def rank(number, sizes):
    with dshuffle.spmd(sys.argv[1], batch_size=8, **sizes(number)) as loader:
        for epoch in loader.epochs(1):
            print("given", sum(len(ids) for ids, _ in epoch), flush=True)

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


@pytest.mark.slow
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
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("rank is not allowed: multiprocessing has started this process without one") == 2


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert sorted(map(int, seen)) == list(range(103))


def test_a_mark_beyond_what_was_given(in_threads):
    def loop(loader):
        epoch = next(loader.epochs(1))
        epoch.mark_trained(1)

    [error] = in_threads(1, loop)
    assert "n_batches=1 is not allowed; it must be at most 0, the batches that were given" in str(error)


class FakeGroup:
    """The part of ``torch.distributed`` that says how large its process group is."""

    is_available = is_initialized = staticmethod(lambda: True)
    get_world_size = staticmethod(lambda: 3)


def test_a_process_group_of_another_size(in_threads, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", FakeGroup)
    for error in in_threads(2, len):
        assert "world_size=2 is not allowed; it must be 3, as the process group of PyTorch has it" in str(error)


def test_a_process_group_that_is_made_after_the_loader(in_threads, monkeypatch):
    def loop(loader):
        monkeypatch.setitem(sys.modules, "torch.distributed", FakeGroup)
        len(loader)

    [error] = in_threads(1, loop)
    assert "world_size=1 is not allowed; it must be 3" in str(error)
