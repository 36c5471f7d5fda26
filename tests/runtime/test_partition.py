"""A partition's rows, by themselves: in both orders, and after their task has ended."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from dshuffle.errors import StaleEpoch
from dshuffle.exchange.cache_partition import RowFile
from dshuffle.rows import RowLayout
from dshuffle.runtime import Partition


@pytest.fixture
def partition():
    """Three samples, of which the one in row 2 comes first."""
    layout = RowLayout.of({"x": (np.dtype("f4"), (2,)), "y": (np.dtype(">i4"), ())})
    rows = layout.empty(3)
    layout.column(rows, "x")[:] = [[0, 1], [2, 3], [4, 5]]
    layout.column(rows, "y")[:] = [10, 11, 12]
    return Partition(layout, rows, np.array([2, 0]), np.array([70, 50]), rank=1, epoch=4)


def test_all_orders_end_with_the_task(partition):
    first, second = partition.as_stored(), partition.as_stored()
    assert [stored["y"].tolist() for stored in (first, second)] == [[10, 12]] * 2
    batches = first.batches(1)
    next(batches)
    partition.close()
    for stale in (lambda: partition["x"], lambda: first["x"], lambda: second["x"], lambda: next(batches)):
        with pytest.raises(StaleEpoch, match="the partition of rank 1, epoch 4 was used after its task had ended"):
            stale()
    for stale in (partition.as_stored, first.as_stored, second.mark_trained, lambda: second.rows("x")):
        with pytest.raises(StaleEpoch):
            stale()


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("order", ["trained", "stored"])
def test_rows_are_those_of_the_order(partition, name, order):
    """``y`` is in another byte order than the machine's on most machines, so it is decoded into a copy."""
    if order == "stored":
        partition = partition.as_stored()
    array, first, slots = partition.rows(name)
    expected = {"x": [[4, 5], [0, 1]], "y": [[12], [10]]}[name]
    width = len(expected[0])
    assert array[slots, first : first + width].tolist() == (expected if order == "trained" else expected[::-1])
    assert array.dtype.isnative
    assert not array.flags.writeable


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_partition_stays_where_it_is(partition, send):
    for kept in (partition, partition.as_stored()):
        with pytest.raises(TypeError, match="cannot be sent to another process; return arrays instead"):
            send(kept)


def test_an_array_that_is_not_there(partition):
    with pytest.raises(KeyError, match=r"no array 'z' in this dataset; it has \['x', 'y'\]"):
        partition.take(slice(None), ["x", "z"])


def test_names_may_be_an_iterator_also_if_the_rows_are_on_a_disk(tmp_path):
    layout = RowLayout.of({"x": (np.dtype("f4"), ()), "y": (np.dtype("f4"), ())})
    file = RowFile(layout, 2, str(tmp_path))
    layout.column(file.rows, "x")[:] = [1, 2]
    layout.column(file.rows, "y")[:] = [3, 4]
    partition = Partition(layout, file.rows, np.array([1, 0]), np.array([7, 5]), rank=0, epoch=0, file=file)
    taken = partition.take(slice(None), iter(["x", "y"]))
    assert {name: values.tolist() for name, values in taken.items()} == {"x": [2, 1], "y": [4, 3]}
    partition.close()
    file.close()
