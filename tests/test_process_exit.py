"""What still runs when a process ends without the last collections, and in which processes that happens."""

import subprocess
import sys

import numpy as np
import pytest

import dshuffle

FROZEN = """
import atexit, gc
at_start = gc.get_freeze_count()  # CPython 3.12.1 begins with some
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > at_start, "enabled:", gc.isenabled()))  # runs last
"""


def output(program, *arguments):
    command = [sys.executable, "-c", FROZEN + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def dataset(tmp_path):
    url = str(tmp_path / "x.zarr")
    dshuffle.create_dataset(url, {"x": np.arange(10.0)})
    return url


def test_handlers_and_finalizers_run_whenever_they_were_registered():
    program = """
import weakref
from dshuffle.process_exit import end_without_last_collections

class Link:
    def __init__(self, name):
        self.name, self.me = name, self

    def __del__(self):
        print(self.name)

before = Link("deleted")
weakref.finalize(print, print, "finalizer before")
end_without_last_collections()
end_without_last_collections()  # one handler, however many sessions there are
weakref.finalize(print, print, "finalizer after")
atexit.register(print, "handler after")
garbage = Link("garbage")
del before, garbage
print("end")
"""
    lines = output(program).splitlines()
    assert lines[0] == "end"
    assert lines[-1] == "frozen: True enabled: False"
    assert sorted(lines[1:-1]) == sorted(["finalizer before", "finalizer after", "handler after", "deleted", "garbage"])


@pytest.mark.slow
def test_workers_with_a_nanny_end_without_last_collections(tmp_path, dataset):
    """The program's handler is registered before the session, so it runs after that of the session."""
    program = """
import os, sys
from pathlib import Path
import dshuffle
from distributed import Client

def note(folder):
    Path(folder, str(os.getpid())).write_text(f"frozen: {gc.get_freeze_count() > 0} enabled: {gc.isenabled()}")

with Client(processes=True, n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
    client.run(atexit.register, note, sys.argv[1])
    dshuffle.Shuffler(client, sys.argv[2]).close()
"""
    output(program, str(tmp_path), dataset)
    assert [note.read_text() for note in tmp_path.iterdir() if note.is_file()] == ["frozen: True enabled: False"] * 2
