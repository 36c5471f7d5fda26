"""Rows in a file on a disk: the same rows, little memory, and no file that is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from dshuffle.errors import CacheBudgetError
from dshuffle.exchange import cache_partition as row_file
from dshuffle.exchange.cache_partition import RowFile
from dshuffle.rows import RowLayout

LAYOUT = RowLayout.of({"x": (np.dtype("f8"), (512,))})
"""Rows of a page."""


def watching() -> bool:
    """Whether a thread looks at the memory."""
    return any(thread.name == "dshuffle-pages" for thread in threading.enumerate())


def test_rows_survive_that_their_pages_are_given_back(tmp_path):
    file = RowFile(LAYOUT, 1000, str(tmp_path / "new" / "folder"))
    expected = np.random.default_rng(0).integers(0, 256, file.rows.shape, dtype=np.uint8)
    file.rows[:] = expected
    before = psutil.Process().memory_info().rss
    file.release()
    assert before - psutil.Process().memory_info().rss > 3_000_000
    assert np.array_equal(file.rows, expected)
    assert os.listdir(tmp_path / "new" / "folder") == []
    file.close()


def test_a_thread_looks_at_the_memory_until_the_file_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(row_file, "MARGIN", -(2**40))
    file = RowFile(LAYOUT, 10, str(tmp_path), memory_limit=1)
    released = []
    monkeypatch.setattr(file, "release", lambda: released.append(1))
    deadline = time.monotonic() + 10
    while not released and time.monotonic() < deadline:
        time.sleep(0.01)
    assert released
    file.close()
    time.sleep(0.1)
    released.clear()
    time.sleep(0.2)
    assert not released


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(folder) -> tuple[int, bool]:
    """Descriptors of files in a folder, and whether one of these is mapped."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith(str(folder)) for name in names), str(folder) in Path("/proc/self/maps").read_text()


def test_closing_frees_all_at_once(tmp_path, no_collection):
    assert not watching()
    file = RowFile(LAYOUT, 10, str(tmp_path), memory_limit=2**40)
    assert watching()
    assert left(tmp_path) == (2, True)
    file.close()
    file.close()
    deadline = time.monotonic() + 5
    while watching():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rows = LAYOUT.empty(1)
    file.read(np.array([1]), rows)  # who has the file can use it
    assert left(tmp_path) == (2, True)
    del file
    assert left(tmp_path) == (0, False)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CacheBudgetError, match=r"cannot hold 4096000 bytes \(.*No space left.*are free"):
        RowFile(LAYOUT, 1000, str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("width", [7, 1024])
def test_rows_are_read_as_they_were_written(tmp_path, width):
    layout = RowLayout.of({"x": (np.dtype("f4"), (width,))})
    file = RowFile(layout, 3000, str(tmp_path))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 255, (3000, layout.nbytes), np.uint8)
    file.write(rng.permutation(3000), rows)
    expected = file.rows.copy()
    file.drop_pages(np.arange(3000))
    for slots in (np.arange(3000), rng.permutation(3000), np.array([5, 6, 7, 2, 3, 2999, 0]), np.arange(0)):
        found = layout.empty(len(slots))
        file.will_need(slots)
        file.read(slots, found)
        np.testing.assert_array_equal(found, expected[slots])
    with pytest.raises(OSError, match="the row in slot 3000 of a partition on the disk could not be read"):
        file.read(np.array([1, 3000]), layout.empty(2))
    file.close()
