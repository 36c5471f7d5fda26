"""What still runs when a process ends without the last collections, and in which processes that happens."""

import subprocess
import sys

FROZEN = """
import atexit, gc
at_start = gc.get_freeze_count()  # CPython 3.12.1 begins with some
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > at_start, "enabled:", gc.isenabled()))  # runs last
"""


def output(program, *arguments):
    command = [sys.executable, "-c", FROZEN + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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
