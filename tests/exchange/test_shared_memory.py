"""Memory that another process maps: it has the sender's bytes, leaves nothing behind, and fails with an OSError."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from dshuffle.exchange import comms as shared_memory
from dshuffle.exchange.comms import Place, buffer_nbytes, host, mapped, may_share

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files in memory")

HOLD = """
import sys
import numpy as np
from dshuffle.exchange.comms import SharedMemory, buffer_nbytes, host
n_rows, row_nbytes = 6, 40
memory = SharedMemory(3 * buffer_nbytes(n_rows, row_nbytes))
for number, (rows, checksums, place) in enumerate(memory.cut(n_rows, row_nbytes)):
    rows[:] = np.arange(rows.size).reshape(rows.shape) % 251 + number
    checksums[:] = np.arange(n_rows) + 1000 * number
    print(*place, flush=True)
print(host(), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process():
    """Another process with three buffers, the places of these, and the name of its host."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        places = [Place(*map(int, process.stdout.readline().split())) for _ in range(3)]
        yield process, places, process.stdout.readline().strip()
        process.kill()


@pytest.fixture(scope="module")
def holder():
    """A process that all tests share; none of them changes what it holds."""
    with another_process() as shared:
        yield shared


def check(number: int, rows: np.ndarray, checksums: np.ndarray) -> None:
    np.testing.assert_array_equal(rows, np.arange(240).reshape(6, 40)[: len(rows)] % 251 + number)
    np.testing.assert_array_equal(checksums, np.arange(len(rows)) + 1000 * number)


def test_another_process_maps_rows_and_checksums() -> None:
    with another_process() as (process, places, name):
        check_mapped(process, places, name)


def check_mapped(process: subprocess.Popen[str], places: list[Place], name: str) -> None:
    assert may_share(name)
    arrays = [mapped(place) for place in places]
    for number, (rows, checksums) in enumerate(arrays):
        check(number, rows, checksums)
        assert rows.flags.writeable
        assert rows.flags.c_contiguous
        assert rows.ctypes.data % 64 == 0
    check(1, *mapped(places[1]._replace(n_rows=4)))
    process.kill()
    process.wait()
    for number, (rows, checksums) in enumerate(arrays):  # what has been mapped outlives its sender
        check(number, rows, checksums)
    with pytest.raises(OSError, match=f"/proc/{places[0].pid}/fd"):
        mapped(places[0])


def test_a_number_that_the_sender_uses_for_another_file(holder) -> None:
    place = holder[1][0]
    with pytest.raises(OSError, match=f"process {place.pid} no longer has this memory"):
        mapped(place._replace(inode=place.inode + 1))
    with pytest.raises(OSError, match=f"process {place.pid} no longer has this memory"):
        mapped(place._replace(device=place.device + 1))


def test_a_place_beyond_the_end_of_the_file(holder) -> None:
    place = holder[1][0]
    with pytest.raises(OSError, match="has less memory than it says"):
        mapped(place._replace(n_rows=100, rows_after=448, row_nbytes=2**70))
    with pytest.raises(OSError, match="has less memory than it says"):
        mapped(place._replace(first=3 * buffer_nbytes(6, 40)))


@pytest.mark.parametrize(
    "numbers",
    [{"first": -4096}, {"first": 1}, {"n_rows": -1}, {"row_nbytes": -1}],
    ids=str,
)
def test_a_place_that_is_no_part_of_the_file(holder, numbers: dict[str, int]) -> None:
    place = holder[1][0]
    with pytest.raises(OSError, match=r"has less memory than it says|Invalid argument"):
        mapped(place._replace(**numbers))


def test_a_sender_cannot_cut_off_what_a_receiver_has_mapped(holder) -> None:
    place = holder[1][2]
    arrays = mapped(place)
    file = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR)
    try:
        for nbytes in (0, 2**24):
            with pytest.raises(PermissionError):
                os.ftruncate(file, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(file)
    check(2, *arrays)  # SIGBUS otherwise


def test_a_receiver_cannot_change_the_memory_of_a_sender(holder) -> None:
    place = holder[1][1]
    rows, checksums = mapped(place)
    rows[:], checksums[:] = 0, 0
    check(1, *mapped(place))


def place_of(file: int) -> Place:
    status = os.fstat(file)
    return Place(os.getpid(), file, status.st_dev, status.st_ino, 0, 64, 2, 8)


def test_memory_that_its_owner_could_cut_off_is_not_mapped() -> None:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096)
        with pytest.raises(OSError, match="is not sealed against shrinking"):
            mapped(place_of(file))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        mapped(place_of(file))
    finally:
        os.close(file)


def test_who_has_no_such_memory_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_share(host())
    assert not may_share("")
    assert not may_share("another host")
    monkeypatch.delattr(os, "memfd_create")
    shared_memory.host.cache_clear()
    try:
        assert host() == ""
        assert not may_share("")
    finally:
        shared_memory.host.cache_clear()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_processes_in_another_network_namespace_use_the_network() -> None:
    code = "from dshuffle.exchange.comms import host; print(host())"
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot make a network namespace: {done.stderr.strip()}")
    assert done.stdout.strip() not in ("", host())
