"""Kernels load when they are called, and are then what numba makes of them."""

import pickle
import subprocess
import sys

import numba
import numpy as np
import pytest

import dshuffle.rows
from dshuffle.kernels import Instruction, kernel
from dshuffle.planning.grouping import count_holders, popcount
from dshuffle.rows import checksum_rows
from dshuffle.store import scatter


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
    assert doubled_sum.nopython_signatures[0].return_type is numba.int64


def test_a_kernel_can_be_called_by_a_user_s():
    @numba.njit
    def twice(words):
        return popcount(words[0]) + popcount(words[1])

    assert twice(np.array([7, 8], np.uint64)) == 4
    assert count_holders(np.array([[7, 8]], np.uint64), 0) == 4


def test_a_kernel_travels_by_its_name():
    assert pickle.loads(pickle.dumps(popcount)) is popcount


def test_an_instruction_is_not_for_python():
    with pytest.raises(NotImplementedError, match="only kernels can call count_bits"):
        Instruction("count_bits")(1)


@pytest.mark.slow
def test_numba_loads_with_the_first_kernel():
    code = """
import sys
import numpy as np
import dshuffle.rows
from dshuffle.kernels import worth_a_kernel
from dshuffle.planning.grouping import group_by
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
    monkeypatch.setattr(scatter, "worth_a_kernel", lambda n_items: with_numba)
    block, target = np.arange(12, dtype=np.uint8).reshape(4, 3), np.zeros(10, np.uint8)
    scatter.scatter_rows(block, np.array([101, 103]), 100, target, np.array([6, 1]))
    assert target.tolist() == [0, 9, 10, 11, 0, 0, 3, 4, 5, 0]

    # Blocks with rows of one and of two items, four rows each.
    columns, target = np.arange(12, dtype=np.uint32), np.zeros(8, np.uint32)
    begins, widths, offsets = np.array([0, 4]), np.array([1, 2]), np.array([2, 0])
    scatter.scatter_columns(columns, begins, widths, offsets, np.array([11, 13]), 10, target, np.array([4, 0]))
    assert target.tolist() == [10, 11, 3, 0, 6, 7, 1, 0]
