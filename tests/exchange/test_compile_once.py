from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dshuffle.exchange import compile_once as module
from dshuffle.exchange.compile_once import compile_once


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The caches of a user, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")  # nothing is written there
    return tmp_path / "dshuffle"


def test_the_first_finishes_before_the_others_start(folder):
    events = []

    def work(number: int) -> None:
        with compile_once("x"):
            events.append(("in", number))
            time.sleep(0.02)
            events.append(("out", number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    # A thread that comes after the first has finished does not wait, so the others may overlap.
    (_, first), (then, number) = events[:2]
    assert (then, number) == ("out", first)
    assert sorted(events) == [(step, number) for step in ("in", "out") for number in range(4)]


def test_nobody_waits_once_it_is_done(folder):
    with compile_once("x"):
        pass
    together = threading.Barrier(2, timeout=10)

    def work(_: int) -> None:
        with compile_once("x"):
            together.wait()  # breaks if only one can be here

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_other_kernels_have_another_lock(folder):
    with compile_once("x"), compile_once("y"):
        pass
    assert [path.read_bytes() for path in folder.iterdir()] == [b"1", b"1"]


def test_a_failure_leaves_it_to_the_next(folder):
    with pytest.raises(ZeroDivisionError), compile_once("x"):
        _ = 1 / 0
    assert [path.read_bytes() for path in folder.iterdir()] == [b""]
    with compile_once("x"):
        pass
    assert [path.read_bytes() for path in folder.iterdir()] == [b"1"]


def test_what_the_work_raises_is_not_taken_for_an_error_of_the_lock(folder):
    for _ in range(2):
        with pytest.raises(OSError, match="mine"), compile_once("x"):
            raise OSError("mine")


def test_another_host_compiles_for_itself(folder, monkeypatch):
    """Hosts may share the folder, for instance a home directory, but not numba's cache."""
    with compile_once("x"):
        pass
    monkeypatch.setattr("platform.node", lambda: "another host")
    with compile_once("x"):
        pass
    assert len(list(folder.iterdir())) == 2


def test_files_that_nobody_has_used_for_a_week_are_removed(folder):
    for kernels in ("old", "used", "compiling"):
        with compile_once(kernels):
            pass
    names = {kernels: folder / module._name(kernels) for kernels in ("old", "used", "compiling", "new")}
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    (folder / "key").write_bytes(b"another file")
    os.utime(folder / "key", (0, 0))
    with compile_once("used"):  # which needs no lock
        pass
    with names["compiling"].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with compile_once("new"):
            assert {path.name for path in folder.iterdir()} == {
                "key",
                *(names[kernels].name for kernels in ("used", "compiling", "new")),
            }
    assert names["new"].read_bytes() == names["used"].read_bytes() == b"1"


def test_a_file_that_is_removed_while_a_process_waits_for_it_is_made_again(folder):
    """Else the next process would lock another file, and two would compile at the same time."""
    opened = threading.Event()
    path = folder / module._name("x")

    def wait_for_it() -> bytes:
        with compile_once("x"):
            assert path.exists()
        return path.read_bytes()

    with compile_once("y"):  # makes the folder
        pass
    path.touch(mode=0o600)
    with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        lock = module._lock

        def locked(descriptor: int) -> None:
            opened.set()
            lock(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_lock", locked)
            waiting = pool.submit(wait_for_it)
            assert opened.wait(10)
            path.unlink()
            fcntl.flock(file, fcntl.LOCK_UN)
            assert waiting.result(10) == b"1"


def test_a_symbolic_link_in_place_of_a_lock_is_not_followed(folder, tmp_path, caplog):
    victim = tmp_path / "victim"
    victim.touch()
    with compile_once("x"):
        pass
    (lock,) = folder.iterdir()
    lock.unlink()
    lock.symlink_to(victim)
    with compile_once("x"):
        pass
    assert victim.read_bytes() == b""
    assert "compiles the dshuffle kernels for itself" in caplog.text


def test_nothing_in_the_folder_for_temporary_files_matters(folder, tmp_path, monkeypatch):
    """Other users can write there, and could lock or link what they find."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with compile_once("x"):
        pass
    assert not list(shared.iterdir())


def test_an_unwritable_folder_and_a_long_wait_are_worked_around(folder, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        with compile_once("x"):
            pass
    assert "compiles the dshuffle kernels for itself" in caplog.text

    caplog.clear()
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.05)
    with compile_once("x"), ThreadPoolExecutor(1) as pool:

        def work() -> bool:
            with compile_once("x"):
                return True

        assert pool.submit(work).result(timeout=10)
    assert "compiles the dshuffle kernels for itself" in caplog.text


def test_only_long_work_is_announced(folder, monkeypatch, caplog):
    monkeypatch.setattr(module, "SILENT", 0.05)
    with caplog.at_level(logging.WARNING), compile_once("x"):
        assert not caplog.text
        time.sleep(0.3)
    assert "Compiling kernels, once on this host: x." in caplog.text


@pytest.mark.slow
def test_processes_share_what_one_compiled(tmp_path):
    """Of three processes at once, one compiles, and the others load what it stored."""
    script = tmp_path / "kernels.py"
    script.write_text("""
import numpy as np
from dshuffle.exchange.compile_once import compile_once
from dshuffle.kernels import kernel

@kernel()
def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result

with compile_once("of a test"):
    total(np.arange(3))
print(sum(total.stats.cache_misses.values()), sum(total.stats.cache_hits.values()))
""")
    folders = {"NUMBA_CACHE_DIR": tmp_path / "numba", "XDG_CACHE_HOME": tmp_path, "TMPDIR": tmp_path}
    environment = {**{name: str(folder) for name, folder in folders.items()}, "PATH": "/usr/bin:/bin"}
    running = [
        subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        for _ in range(3)
    ]
    said = [process.communicate(timeout=300)[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    misses, hits = ([int(line[i]) for line in said] for i in range(2))
    assert sorted(map(bool, misses)) == [False, False, True], said
    assert sorted(map(bool, hits)) == [False, True, True], said
