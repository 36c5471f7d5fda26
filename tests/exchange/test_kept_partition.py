"""Partitions that outlive their session: read as they were, never while somebody fills them, never wrong rows."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dshuffle.errors import ExchangeError
from dshuffle.exchange.cache_partition import CachePartition, RowFile
from dshuffle.exchange.kept_partition import KeptFolder, KeptLabel, KeptPartition, PartitionFolder, remove_unused
from dshuffle.planning import WorkerHistory
from dshuffle.rows import RowLayout, checksum_rows

LAYOUT = RowLayout.of({"x": (np.dtype("f8"), (3,))})
LABEL = KeptLabel("data", "global", "first", LAYOUT.nbytes, n_slots=12, history=WorkerHistory(2), rank=1)
NEXT = dataclasses.replace(LABEL, session="next")
OTHER = dataclasses.replace(NEXT, dataset="other")
HELD = np.array([3, 4, 9, 20])


def filled(directory, held=HELD, label=LABEL, epoch=5):
    """A folder with rows whose numbers are those of their samples, and the cache that has them."""
    folder = PartitionFolder(str(directory), label)
    file = RowFile(LAYOUT, label.n_slots, str(directory), file=folder.open_rows())
    cache = CachePartition(LAYOUT, capacity=8, incoming=4, file=file)
    load(cache, held)
    folder.write(epoch, cache.index, cache.checksums)
    return folder, cache


def load(cache, held, keep=()):
    slots = cache.reserve(np.asarray(held))
    LAYOUT.column(cache.rows, "x")[slots] = np.asarray(held)[:, np.newaxis]
    cache.add_checksums(np.asarray(held), slots)
    cache.commit(cache.prepare(np.union1d(held, keep).astype(np.int64)))


def kept(directory):
    """A partition that its session has left."""
    folder, _ = filled(directory)
    folder.close()
    return folder.path


def read(partition, sample_ids):
    """What it has of samples: rows, checksums, and which of these are right."""
    rows, checksums = partition.read(sample_ids)
    return rows, checksums, checksum_rows(rows, sample_ids) == checksums


def test_the_rows_are_those_of_the_session(tmp_path):
    partition = KeptPartition(kept(tmp_path), LAYOUT)
    rows, checksums, found = read(partition, np.array([20, 5, 3, 0, 99]))
    assert found.tolist() == [True, False, True, False, False]
    assert LAYOUT.column(rows[found], "x").tolist() == [[20] * 3, [3] * 3]
    cache = CachePartition(LAYOUT, capacity=8, incoming=0)
    cache.unpack(np.array([20, 3]), cache.reserve(np.array([20, 3])), rows[found], checksums[found])
    partition.close()


def test_what_is_there_is_listed_for_its_dataset_alone(tmp_path, caplog):
    path = kept(tmp_path)
    [one] = KeptFolder.all_in(str(tmp_path), "data")
    assert (one.name, one.label.epoch, one.label.rank) == (os.path.basename(path), 5, 1)
    assert dataclasses.replace(one.label, epoch=-1) == LABEL
    assert KeptFolder.all_in(str(tmp_path), "other") == []
    assert KeptFolder.all_in(str(tmp_path / "none"), "data") == []
    assert not caplog.text


def test_a_partition_that_a_session_fills_is_not_touched(tmp_path):
    folder, _ = filled(tmp_path)
    assert KeptFolder.all_in(str(tmp_path), "data") == []
    assert remove_unused(str(tmp_path), NEXT) == 0
    with pytest.raises(ExchangeError, match="another session uses it"):
        KeptPartition(folder.path, LAYOUT)
    folder.close()
    assert len(KeptFolder.all_in(str(tmp_path), "data")) == 1


def test_a_partition_is_not_removed_while_it_is_read(tmp_path):
    path = kept(tmp_path)
    readers = [KeptPartition(path, LAYOUT), KeptPartition(path, LAYOUT)]
    assert remove_unused(str(tmp_path), NEXT) == 0
    readers[0].close()
    assert remove_unused(str(tmp_path), NEXT) == 0
    assert read(readers[1], HELD)[2].all()
    readers[1].close()
    assert remove_unused(str(tmp_path), OTHER) == 0
    assert remove_unused(str(tmp_path), NEXT) == 1
    assert os.listdir(tmp_path) == []


def test_the_next_session_removes_what_nobody_uses(tmp_path):
    old = kept(tmp_path)
    (tmp_path / "of-somebody-else").mkdir()
    folder, cache = filled(tmp_path, label=NEXT)
    assert not os.path.exists(old)
    again = kept(tmp_path)
    folder.write(6, cache.index, cache.checksums)
    assert not os.path.exists(again)
    assert os.path.exists(folder.path)
    assert (tmp_path / "of-somebody-else").exists()
    folder.close()


def test_a_session_leaves_the_partitions_of_its_workers_that_have_closed(tmp_path):
    first = kept(tmp_path)
    folder, _ = filled(tmp_path, label=dataclasses.replace(LABEL, rank=0))
    assert os.path.exists(first)
    folder.close()
    folder, _ = filled(tmp_path)  # another worker has taken rank 1
    assert not os.path.exists(first)
    folder.close()
    assert len(os.listdir(tmp_path)) == 2


def test_a_session_without_rows_leaves_nothing(tmp_path):
    folder = PartitionFolder(str(tmp_path / "new" / "folder"), LABEL)
    folder.close()
    assert os.listdir(tmp_path / "new" / "folder") == []


def test_rows_that_were_overwritten_after_the_index_was_written_are_not_found(tmp_path):
    """As when a process is killed while rows of the next epoch but one arrive in the slots of evicted rows."""
    folder, cache = filled(tmp_path)
    load(cache, [30, 31], keep=[3, 4])  # evicts 9 and 20
    load(cache, [40, 41, 42, 43], keep=[3, 4])
    load(cache, [50, 51, 52, 53], keep=[3, 4])
    folder.close()
    partition = KeptPartition(folder.path, LAYOUT)
    rows, _, found = read(partition, HELD)
    assert found.tolist() == [True, True, False, False]
    assert LAYOUT.column(rows[found], "x")[:, 0].tolist() == [3, 4]
    partition.close()


def test_a_row_that_changed_on_the_disk_is_not_found(tmp_path):
    path = kept(tmp_path)
    with open(os.path.join(path, "rows"), "r+b") as file:
        file.write(b"\x01")  # the first slot
    partition = KeptPartition(path, LAYOUT)
    assert read(partition, HELD)[2].sum() == 3
    partition.close()


def index_of(path, **changes):
    """Write an index with other contents."""
    start = changes.pop("start", b"dshuffle 4 ")
    header, data = Path(path, "index").read_bytes().removeprefix(b"dshuffle 4 ").split(b"\n", 1)
    records = np.frombuffer(data, [("sample_id", "<i8"), ("slot", "<i8"), ("checksum", "<u4")]).copy()
    for name in set(records.dtype.names) & set(changes):
        records[name] = changes.pop(name)
    fields = {key: value for key, value in (json.loads(header) | changes).items() if value is not None}
    Path(path, "index").write_bytes(start + json.dumps(fields).encode() + b"\n" + records.tobytes())


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"start": b"dshuffle 3 "}, False),
        ({"rank": None}, False),
        ({"epoch": "9"}, False),
        ({"session": 9}, False),
        ({"history": {"n_workers": 0}}, False),
        ({"row_nbytes": 8}, True),
        ({"n_slots": 1000}, True),
    ],
    ids=str,
)
def test_an_index_that_describes_no_rows_is_ignored(tmp_path, changes, listed):
    path = kept(tmp_path)
    index_of(path, **changes)
    assert len(KeptFolder.all_in(str(tmp_path), "data")) == listed
    with pytest.raises(ExchangeError, match="is damaged"):
        KeptPartition(path, LAYOUT)
    assert remove_unused(str(tmp_path), NEXT) == 1  # whoever tried to read it has let go of it


@pytest.mark.parametrize("slots", [[0, 1, 2, 12], [-1, 1, 2, 3]], ids=str)
def test_slots_that_do_not_exist_cannot_be_read(tmp_path, slots):
    path = kept(tmp_path)
    index_of(path, slot=slots)
    partition = KeptPartition(path, LAYOUT)
    with pytest.raises(OSError, match="could not be read"):
        partition.read(HELD)
    partition.close()


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files to another user")
    os.chown(path, 12345, 12345)


def rows_of_another_user(path: Path) -> None:
    of_another_user(path / "rows")


def open_to_others(path: Path) -> None:
    path.chmod(0o755)


def behind_a_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def linked_rows(path: Path) -> None:
    (path / "rows").rename(path.parent / "elsewhere")
    (path / "rows").symlink_to(path.parent / "elsewhere")


def a_pipe(path: Path) -> None:
    (path / "rows").unlink()
    os.mkfifo(path / "rows")


@pytest.mark.parametrize(
    "change", [of_another_user, rows_of_another_user, open_to_others, behind_a_link, linked_rows, a_pipe]
)
@pytest.mark.timeout(20)  # opening a pipe waits for its other end
def test_what_another_user_may_have_made_is_neither_used_nor_removed(tmp_path, change):
    path = Path(kept(tmp_path))
    change(path)
    assert KeptFolder.all_in(str(tmp_path), "data") == []
    with pytest.raises(ExchangeError, match="is damaged, or another session uses it"):
        KeptPartition(str(path), LAYOUT)
    assert remove_unused(str(tmp_path), NEXT) == 0
    assert path.exists()


def test_only_the_user_can_enter_a_partition(tmp_path):
    earlier = os.umask(0)
    try:
        path = Path(kept(tmp_path))
    finally:
        os.umask(earlier)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_its_partition(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_kept_partition import filled
folder, cache = filled({str(tmp_path)!r})
print("filled", flush=True)
import time
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"filled\n"
        assert KeptFolder.all_in(str(tmp_path), "data") == []
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    deadline = time.monotonic() + 10
    while not (found := KeptFolder.all_in(str(tmp_path), "data")) and time.monotonic() < deadline:
        time.sleep(0.01)
    partition = KeptPartition(str(tmp_path / found[0].name), LAYOUT)
    assert read(partition, HELD)[2].all()
    partition.close()
