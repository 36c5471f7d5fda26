"""A dataset is written again in random order: every sample once, with its bytes, in bounded memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

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
    with pytest.raises(InvalidParameter, match="must be another place than the source of"):
        shuffle_dataset(memory, IN, overwrite=True)
    assert set(open_dataset(tmp_path / "d").arrays) == set(whole.arrays)


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
        ({"memory_budget": 0}, "memory_budget=0 is not allowed; it must be a number of bytes >= 8"),
        ({"chunk_rows": 0}, "chunk_rows=0 is not allowed"),
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
    with pytest.raises(DatasetError, match=r"nowhere' cannot hold the dataset: .*No such file"):
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
