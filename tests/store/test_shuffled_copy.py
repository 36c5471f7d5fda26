"""A dataset is written again in random order: every sample once, with its bytes, in bounded memory."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.cli import main
from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, shuffle_dataset, verify_dataset
from dshuffle.store.create import _remove

from ..conftest import at_most

IN, OUT = "memory://copy-in", "memory://copy-out"


def arrays(q):
    return {
        "x": np.arange(q * 6.0).reshape(q, 2, 3),
        "y": np.arange(q, dtype="i2"),
        "word": np.array([f"w{number}" for number in range(q)]),
        "nothing": np.empty((q, 0)),
    }


@given(
    q=st.integers(1, 300),
    budget=st.integers(8, 20_000),
    seed=st.integers(0, 5),
    chunk_rows=st.integers(1, 50),
    read_chunk=st.integers(1, 50),
)
@at_most(40)
def test_the_copy_is_a_permutation_of_rows(q, budget, seed, chunk_rows, read_chunk):
    expected = arrays(q)
    create_dataset(IN, expected, chunk_rows=read_chunk, overwrite=True)
    made = shuffle_dataset(IN, OUT, seed=seed, chunk_rows=chunk_rows, memory_budget=budget, overwrite=True)
    found = made.read_rows(np.arange(q))
    order = found["y"].astype(int)
    assert sorted(order) == list(range(q))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values[order])
    assert made.arrays["x"].chunk_rows == min(chunk_rows, q)
    # The order depends on the seed and the number of samples alone.
    again = shuffle_dataset(IN, OUT, seed=seed, memory_budget="1 MiB", overwrite=True)
    np.testing.assert_array_equal(again.read_rows(np.arange(q))["y"], order)


@pytest.mark.parametrize("budget", [300, "1 MiB"])
def test_every_chunk_has_its_share_of_each_class(budget):
    q = 240
    create_dataset(IN, {"x": np.arange(q), "label": np.repeat([3, 5, 9], [120, 80, 40])}, overwrite=True)
    made = shuffle_dataset(IN, OUT, by="label", chunk_rows=24, memory_budget=budget, overwrite=True)
    found = made.read_rows(np.arange(q))
    assert sorted(found["x"]) == list(range(q))
    np.testing.assert_array_equal(np.repeat([3, 5, 9], [120, 80, 40])[found["x"]], found["label"])
    for chunk in found["label"].reshape(10, 24):
        assert abs((chunk == 3).sum() - 12) <= 1
        assert abs((chunk == 9).sum() - 4) <= 1
    assert (found["x"] != np.sort(found["x"])).mean() > 0.9


def test_shards_parts_and_encoded_values(tmp_path):
    group = zarr.create_group(tmp_path / "in")
    group.create_array("t", data=np.arange(100, dtype="i2"), chunks=(7,)).attrs["scale_factor"] = 0.5
    source = open_dataset(tmp_path / "in").select(np.arange(0, 100, 3))
    made = shuffle_dataset(source, tmp_path / "out", chunk_rows=4, shard_rows=8)
    assert (made.n_samples, made.arrays["t"].shard_rows) == (34, 8)
    assert sorted(made.read_rows(np.arange(34))["t"]) == [0.5 * number for number in range(0, 100, 3)]
    assert verify_dataset(made).ok


def test_a_dataset_is_not_replaced_by_its_copy(tmp_path):
    """The copy may lack arrays, samples, shardings and attributes."""
    create_dataset(tmp_path / "d", arrays(50))
    (tmp_path / "link").symlink_to(tmp_path)
    whole = open_dataset(tmp_path / "d")
    for source in (whole, open_dataset(tmp_path / "d", arrays=["y"]), whole.select([1, 2])):
        for url in (tmp_path / "d", f"{tmp_path}/./d", tmp_path / "link" / "d", f"file://{tmp_path}/d"):
            with pytest.raises(InvalidParameter, match="must be another place than the source's"):
                shuffle_dataset(source, url, overwrite=True)
    memory = create_dataset(IN, {"x": np.arange(5.0)}, overwrite=True)
    with pytest.raises(InvalidParameter, match="must be another place than the source's"):
        shuffle_dataset(memory, IN, overwrite=True)
    assert set(open_dataset(tmp_path / "d").arrays) == set(whole.arrays)


def test_the_command_says_what_is_left_out(tmp_path):
    group = zarr.create_group(tmp_path / "d")
    group.create_array("x", data=np.arange(10.0))
    group.create_array("z", data=np.arange(3.0))
    ran = CliRunner().invoke(main, ["dataset", "shuffle", str(tmp_path / "d"), str(tmp_path / "e")])
    assert ran.exit_code == 0, ran.output
    assert "left out: z (" in ran.stderr


@pytest.mark.slow
def test_memory_for_very_many_buckets_is_refused():
    source = create_dataset(IN, {"x": np.zeros((70_000, 2))}, overwrite=True)
    with pytest.raises(InvalidParameter, match="memory_budget=100 is not allowed; it must be at least 256 B for this"):
        shuffle_dataset(source, OUT, memory_budget=100, overwrite=True)
    assert shuffle_dataset(source, OUT, memory_budget=256, overwrite=True).n_samples == 70_000


def test_a_folder_is_removed_although_threads_still_write_into_it(tmp_path):
    folder = tmp_path / "d.partial"

    def write():
        for number in range(50):
            with contextlib.suppress(OSError):  # the folder may go at any moment
                folder.mkdir(exist_ok=True)
                (folder / str(number)).write_text("late")
            time.sleep(0.005)

    thread = threading.Thread(target=write)
    thread.start()
    _remove(str(tmp_path / "nothing"))
    while not folder.exists():
        time.sleep(0.001)
    _remove(str(folder))
    thread.join()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("budget", [8, 1000, 3000, 20_000, 10**6])
def test_chunks_are_read_once(part, budget):
    """The budget is eight times a slab; a chunk of x has 800 bytes."""
    create_dataset(IN, {"x": np.arange(1000.0)}, chunk_rows=100, overwrite=True)
    source = open_dataset(IN)
    source = source.select(np.arange(37, 1000, 2)) if part else source
    before = source.traffic
    shuffle_dataset(source, OUT, memory_budget=budget, overwrite=True)
    assert (source.traffic - before).requests == 10


@given(
    nbytes=st.integers(0, 3000),
    chunk_rows=st.integers(1, 40),
    part=st.booleans(),
)
def test_slabs_are_all_samples_in_whole_chunks(nbytes, chunk_rows, part):
    dataset = create_dataset(IN, {"x": np.arange(200.0)}, chunk_rows=chunk_rows, overwrite=True)
    stored = np.arange(200)
    if part:
        stored = np.flatnonzero(np.random.default_rng(chunk_rows).random(200) < 0.3)
        dataset = dataset.select(stored)
    slabs = list(dataset.slabs(nbytes))
    assert np.concatenate(slabs).tolist() == list(range(dataset.n_samples))
    chunks = [set((stored[slab] // chunk_rows).tolist()) for slab in slabs]
    assert sum(map(len, chunks)) == len(set.union(*chunks))
    assert all(len(slab) * 8 <= nbytes or len(own) == 1 for slab, own in zip(slabs, chunks, strict=True))


def test_progress_counts_what_is_read_and_written():
    create_dataset(IN, {"x": np.arange(100.0), "y": np.arange(100)}, overwrite=True)
    seen = []
    shuffle_dataset(IN, OUT, memory_budget=800, overwrite=True, progress=lambda *said: seen.append(said))
    assert seen[-1] == (400, 400, "rows written")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {text for _, _, text in seen} == {"rows read", "rows written"}


def test_what_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    source = create_dataset(tmp_path / "in", {"x": np.arange(10.0)})
    create_dataset(tmp_path / "out", {"x": np.arange(3.0)})
    before = source.traffic.requests
    with pytest.raises(DatasetExists):
        shuffle_dataset(source, tmp_path / "out")
    for options, message in [
        ({"seed": "a"}, "seed='a' is not allowed"),
        ({"memory_budget": "much"}, "memory_budget='much' is not allowed"),
        ({"memory_budget": 0}, "memory_budget=0 is not allowed; it must be at least 8 B for this dataset"),
        ({"chunk_rows": 0}, "chunk_rows=0 is not allowed"),
        ({"by": "label"}, r"by='label'.*one value for each sample: \['x'\]"),
    ]:
        with pytest.raises(InvalidParameter, match=message):
            shuffle_dataset(source, tmp_path / "new", **options)
    assert source.traffic.requests == before

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(DatasetError, match=r"cannot hold 80 bytes .*No space left"):
            shuffle_dataset(source, tmp_path / "new")
    with pytest.raises(DatasetError, match="nowhere' cannot hold the dataset: there is no such folder"):
        shuffle_dataset(source, tmp_path / "new", temporary=tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_the_command(tmp_path):
    create_dataset(tmp_path / "in", {"x": np.arange(500.0)})
    command = ["dataset", "shuffle", str(tmp_path / "in"), str(tmp_path / "out"), "--chunk-rows", "10"]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == f"wrote 500 samples (4.00 kB) in random order to {tmp_path / 'out'}\n"
    expected = shuffle_dataset(tmp_path / "in", "memory://same", seed=0, overwrite=True).read_rows(np.arange(500))["x"]
    np.testing.assert_array_equal(dshuffle.open_dataset(tmp_path / "out").read_rows(np.arange(500))["x"], expected)
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 1
    assert "already exists" in ran.stderr


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path):
    """256 MB in a process that may use 64 MiB more than it has at the beginning, and some for Zarr."""
    rows = np.zeros((62_500, 1024), "f4")
    rows[:, 0] = np.arange(len(rows))
    create_dataset(tmp_path / "in", {"x": rows}, chunk_rows=256)
    code = f"""
import resource
import numpy as np, dshuffle
warm = dshuffle.create_dataset("memory://a", {{"x": np.zeros((100, 1024), "f4")}})
dshuffle.shuffle_dataset(warm, "memory://b")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = dshuffle.shuffle_dataset({str(tmp_path / "in")!r}, {str(tmp_path / "out")!r}, memory_budget="64 MiB")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) * 1024 < 160 * 2**20
    made = open_dataset(tmp_path / "out")
    assert np.array_equal(np.sort(made.read_rows(np.arange(len(rows)))["x"][:, 0]), rows[:, 0])


KILLED = """
import os, signal, sys
from dshuffle.store import shuffle_dataset, shuffled_copy

shuffled_copy.SAVE_EVERY = 0.0
slabs, die_after = [], int(sys.argv[4])
def progress(done, total, text):
    slabs.append(text)
    if len(slabs) == die_after:
        os.kill(os.getpid(), signal.SIGKILL)
shuffle_dataset(sys.argv[1], sys.argv[2], seed=3, temporary=sys.argv[3], memory_budget=20_000, progress=progress)
"""


@pytest.fixture
def killed(tmp_path):
    """A copy that is killed after some steps of progress, and its arguments."""
    source = create_dataset(str(tmp_path / "in.zarr"), {"x": np.arange(6000.0).reshape(1000, 6)}, chunk_rows=20)
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def kill(after):
        command = [sys.executable, "-c", KILLED, source.url, str(tmp_path / "out.zarr"), str(temporary), str(after)]
        return subprocess.run(command, timeout=100, check=False).returncode

    return source, tmp_path / "out.zarr", temporary, kill


@pytest.mark.slow
@pytest.mark.parametrize("after", [[1], [7, 4], [27]], ids=str)
def test_a_copy_that_was_killed_goes_on(killed, after):
    """The rows that were read stay, and the result is that of a copy that was not killed."""
    source, target, temporary, kill = killed
    for number in after:
        assert kill(number) == -9
    assert not target.exists()
    assert len(list(temporary.iterdir())) == 1
    texts = []
    shuffle_dataset(
        source.url, target, seed=3, temporary=temporary, memory_budget=20_000,
        progress=lambda done, total, text: texts.append(text),
    )  # fmt: skip
    before, read = texts.count("rows read before"), texts.count("rows read")
    assert before + read == 25
    assert before == min(after[0], 25)
    whole = shuffle_dataset(source, target.with_name("whole.zarr"), seed=3, memory_budget=20_000)
    now = open_dataset(target)
    assert np.array_equal(now.read_rows(np.arange(1000))["x"], whole.read_rows(np.arange(1000))["x"])
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_another_copy_does_not_continue_that_one(killed):
    source, target, temporary, kill = killed
    assert kill(5) == -9
    texts = []
    options = {"temporary": temporary, "memory_budget": 20_000, "progress": lambda *args: texts.append(args[2])}
    shuffle_dataset(source, target, seed=4, **options)
    assert "rows read before" not in texts
    assert len(list(temporary.iterdir())) == 1  # of the copy with seed 3


def test_two_copies_at_once_do_not_share_a_folder(tmp_path):
    source = create_dataset(IN, {"x": np.arange(100.0)}, overwrite=True)
    seen = []

    def again(done, total, text):
        if not seen:
            seen.append(text)
            with pytest.raises(DatasetError, match=r"another process uses .* for the same shuffle"):
                shuffle_dataset(source, tmp_path / "b.zarr", temporary=tmp_path)

    shuffle_dataset(source, tmp_path / "a.zarr", temporary=tmp_path, progress=again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zarr"]


def test_a_note_that_is_damaged_is_ignored(tmp_path):
    source = create_dataset(IN, {"x": np.arange(100.0)}, overwrite=True)

    def stop(done, total, text):
        if text == "rows written":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shuffle_dataset(source, tmp_path / "a.zarr", temporary=tmp_path, progress=stop)
    [folder] = [path for path in tmp_path.iterdir() if path.name.startswith("dshuffle-buckets-")]
    (folder / "slabs").write_bytes(b"nothing of this kind")
    texts = []
    copy = shuffle_dataset(
        source, tmp_path / "a.zarr", temporary=tmp_path, progress=lambda *args: texts.append(args[2])
    )
    assert "rows read before" not in texts
    assert sorted(copy.read_rows(np.arange(100))["x"]) == list(range(100))
