"""Kernels load when they are called, and are then what numba makes of them."""

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.sigutils import normalize_signature

import dshuffle.rows
from dshuffle import numba_support
from dshuffle.kernels import Kernel, kernel
from dshuffle.planning import DELIVERIES, Aligned, Choices, EpochPlanner, Global, ShuffleSpec
from dshuffle.planning.types import popcount
from dshuffle.rows import checksum_rows
from dshuffle.store import reader


@kernel(cache=False, inline="always")
def doubled(number):
    return 2 * number


@kernel(cache=False)
def doubled_sum(numbers):
    total = 0
    for number in numbers:
        total += doubled(number)
    return total


def test_a_kernel_calls_others():
    assert doubled_sum(np.arange(5)) == 20
    assert isinstance(doubled_sum.dispatcher, numba.core.dispatcher.Dispatcher)
    assert doubled_sum.dispatcher.nopython_signatures[0].return_type is numba.int64


def test_a_kernel_travels_by_its_name():
    assert pickle.loads(pickle.dumps(popcount)) is popcount


@pytest.mark.slow
def test_numba_loads_with_the_first_kernel():
    code = """
import sys
import numpy as np
import dshuffle.rows
from dshuffle.kernels import worth_a_kernel
from dshuffle.planning.types import group_by
from dshuffle.planning.randomness import permutation
from dshuffle.rows import RowLayout, checksum_rows
permutation(1000, 1), group_by(np.zeros(1000, int), 3)
print("numba" in sys.modules, worth_a_kernel(1000), worth_a_kernel(10**9))
checksum_rows(np.zeros((2, 8), np.uint8), np.arange(2))
print("numba" in sys.modules)
checksum_rows(np.zeros((2**10, 2**9), np.uint8), np.arange(2**10))
print("numba" in sys.modules, worth_a_kernel(1000))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False", "True", "False", "True", "True"]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 12, 20, 1024])
def test_checksums_are_the_same_without_numba(nbytes, monkeypatch):
    rng = np.random.default_rng(nbytes)
    rows, ids = rng.integers(0, 256, (9, nbytes), dtype=np.uint8), rng.integers(0, 2**62, 5)
    slots = rng.integers(0, 9, 5)
    checksums = []
    for with_numba in (False, True):
        monkeypatch.setattr(dshuffle.rows, "worth_a_kernel", lambda n_items, with_numba=with_numba: with_numba)
        checksums.append([*checksum_rows(rows, ids, slots), *checksum_rows(rows[:5], ids)])
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize("with_numba", [False, True])
def test_rows_of_chunks_get_to_their_places(with_numba, monkeypatch):
    monkeypatch.setattr(reader, "worth_a_kernel", lambda n_items: with_numba)
    block, target, none = np.arange(12, dtype=np.uint8).reshape(4, 3), np.zeros(10, np.uint8), np.zeros(1, np.int64)
    reader.scatter(block, np.array([1, 3]), target, np.array([6, 1]), none, none, 3)
    assert target.tolist() == [0, 9, 10, 11, 0, 0, 3, 4, 5, 0]

    # Two items of a row, each of two runs of one byte.
    target = np.zeros(10, np.uint8)
    reader.scatter(block, np.array([2, 7]), target, np.array([6, 1]), np.array([0, 1]), np.array([0, 1]), 1)
    assert target.tolist() == [0, 10, 11, 0, 0, 0, 3, 4, 0, 0]


KERNELS = """
import sys
import numpy as np
from dshuffle.kernels import kernel
from called import tripled

@kernel("(i8[::1],)")
def total(numbers):
    result = 0
    for number in numbers:
        result += tripled(number)
    return result

if __name__ == "__main__":
    print(total(np.arange(4)), sum(total.dispatcher.stats.cache_hits.values()))
"""
CALLED = """
from dshuffle.kernels import kernel
FACTOR = {factor}

@kernel()
def tripled(number):
    return FACTOR * number
"""


def started(folder: Path, factor: int = 3, code: str = "") -> "subprocess.Popen[str]":
    """A new process that calls a kernel, and prints its result and how often it came from the disk."""
    (folder / "own.py").write_text(KERNELS)
    (folder / "called.py").write_text(CALLED.format(factor=factor))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code + "import runpy; runpy.run_path('own.py', run_name='__main__')"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def ran(folder: Path, factor: int = 3, code: str = "") -> list[str]:
    return started(folder, factor, code).communicate(timeout=120)[0].split()


@pytest.mark.slow
def test_machine_code_is_that_of_all_functions_that_are_called(tmp_path):
    assert ran(tmp_path) == ["18", "0"]
    assert ran(tmp_path) == ["18", "1"]
    assert ran(tmp_path, factor=5) == ["30", "0"]  # plain numba: 18
    assert ran(tmp_path) == ["18", "1"]
    for path in tmp_path.glob("cache/dshuffle/*/*.total-*"):
        path.write_bytes(b"\x80\x05")
    assert ran(tmp_path) == ["18", "0"]
    assert ran(tmp_path) == ["18", "1"]


@pytest.mark.slow
def test_one_process_compiles_while_the_others_wait(tmp_path):
    said = [process.communicate(timeout=300)[0].split() for process in [started(tmp_path) for _ in range(3)]]
    assert sorted(said) == [["18", "0"], ["18", "1"], ["18", "1"]]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of machine code."""
    monkeypatch.setattr(numba_support, "_folders", lambda: [tmp_path / "kernels"])
    numba_support._warn.cache_clear()
    return tmp_path / "kernels"


def test_who_waits_too_long_or_cannot_write_compiles_for_itself(folder, monkeypatch, caplog):
    folder.mkdir()
    monkeypatch.setattr(numba_support, "PATIENCE", 0.05)
    with (folder / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert kernel()(lambda number: number + 1)(1) == 2
    assert "compiles kernels without waiting for others" in caplog.text
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(numba_support, "_folders", lambda: [Path("/dev/null/kernels")])
    assert kernel()(lambda number: number + 2)(1) == 3
    assert "cannot be kept in /dev/null/kernels (Not a directory)" in caplog.text


def test_users_who_cannot_write_beside_the_package_have_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    [beside] = numba_support._folders.__wrapped__()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert numba_support._folders.__wrapped__() == [beside, tmp_path / "dshuffle" / beside.name]
    assert numba.__version__ in beside.name
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "x"))
    assert numba_support._folders.__wrapped__() == [tmp_path / "x" / "dshuffle" / beside.name]


CHOICES = [
    Choices(rule, delivery.name, caching, fraction)
    for rule in (Global(), Aligned())
    for delivery in DELIVERIES.values()
    for caching, fraction in ((None, None), ("even", 0.7))
    if fraction is None or delivery.supports(4, excess=True)
]


def test_sessions_call_kernels_with_the_types_for_which_they_are_compiled_ahead(monkeypatch):
    others = set()
    call = Kernel.__call__

    def checked(self, *arguments):
        types = tuple(map(numba.typeof, arguments))
        if types not in [normalize_signature(text)[0] for text in self.signatures]:
            others.add((self.__qualname__, types))
        return call(self, *arguments)

    monkeypatch.setattr(Kernel, "__call__", checked)
    for choices in CHOICES:
        planner = EpochPlanner(ShuffleSpec(400, 4, choices))
        planner.load()
        assert planner.advance().shares is not None
    assert others == set()
