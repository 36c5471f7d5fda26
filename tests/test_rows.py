"""Row layouts, and checksums against the same formula in pure Python."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from dshuffle.errors import InvalidParameter
from dshuffle.rows import RowLayout, checksum_rows, gather_rows, scatter_verified

ROW_SIZES = [1, 7, 8, 12, 31, 32, 33, 72, 100]
MASK = 2**64 - 1


def random_rows(n_rows: int, nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n_rows, nbytes), dtype=np.uint8)


# -- layouts -------------------------------------------------------------------------------------------------------

NESTED = np.dtype([("a", "i2"), ("inner", [("b", ">f8"), ("c", "S3", (2,))], (3,))])
SPREAD = np.dtype({"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [4, 8], "itemsize": 24})
DTYPES = [
    *("?", "i1", "u2", ">i4", "u8", "f2", ">f4", "f8", "g", "c8", ">c16", "S5", "U3", ">U3", "V7"),
    *("M8[s]", "m8[25us]", NESTED, SPREAD, np.dtype([("a", "u1"), ("b", "f8")], align=True)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_a_column_has_its_dtype_and_shape_and_shares_the_memory_of_its_rows(
    dtype: np.dtype, shape: tuple[int, ...]
) -> None:
    dtype = np.dtype(dtype)
    layout = RowLayout.of({"before": (np.dtype("u1"), ()), "x": (dtype, shape), "z": (np.dtype("f4"), (2,))})
    assert layout.nbytes == 1 + dtype.itemsize * int(np.prod(shape)) + 8
    rows = layout.empty(5)
    rows[:] = 0
    column = layout.column(rows, "x")
    assert (column.dtype, column.shape) == (dtype, (5, *shape))
    assert np.shares_memory(column, rows) == bool(column.size)
    column[:] = random_values(dtype, (5, *shape))
    np.testing.assert_array_equal(layout.column(rows, "x"), random_values(dtype, (5, *shape)))
    # The fields beside it are not touched by it.
    assert not layout.column(rows, "before").any()
    assert not layout.column(rows, "z").any()


def random_values(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Values whose bytes are not all zero."""
    words = np.random.default_rng(1).integers(1, 100, (*shape, dtype.itemsize), dtype=np.uint8)
    if dtype.kind == "?":
        words[:] = 1
    if dtype.kind == "U":
        words = np.frombuffer(np.array("a\u00e9b", dtype).tobytes(), np.uint8) + np.zeros((*shape, 1), np.uint8)
    return words.view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layout_travels_and_compares(dtype: np.dtype) -> None:
    arrays = {"x": (np.dtype(dtype), (2,)), "y": (np.dtype("f8"), ())}
    layout = RowLayout.of(arrays)
    copy = pickle.loads(pickle.dumps(layout))
    assert (copy, hash(copy), copy.dtype) == (layout, hash(layout), layout.dtype)
    assert RowLayout.of(dict(reversed(arrays.items()))) == layout  # the order in which arrays are given is no matter
    assert RowLayout.of(arrays | {"x": (np.dtype(dtype), (3,))}) != layout
    assert RowLayout.of(arrays | {"y": (np.dtype(">f8"), ())}) != layout


scalars = st.sampled_from(["u1", "S3", "i2", "f4", "U2", "f8", "M8[s]", "c8", "c16"]).map(np.dtype)


@given(arrays=st.dictionaries(st.text("abc", min_size=1), st.tuples(scalars, st_numpy.array_shapes(max_side=3))))
def test_fields_are_packed_and_every_one_is_aligned_within_the_row(arrays: dict) -> None:
    layout = RowLayout.of(arrays)
    assert layout.nbytes == sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in arrays.values())
    assert sorted(layout.names) == sorted(arrays)
    for name, (dtype, _) in arrays.items():
        assert layout.dtype.fields[name][1] % dtype.alignment == 0


@pytest.mark.parametrize("dtype", ["O", [("a", "i4"), ("b", "O")]], ids=str)
def test_objects_are_refused(dtype: object) -> None:
    with pytest.raises(InvalidParameter, match=r"arrays\['y'\].dtype='object' is not allowed.*fixed size.*Cast it"):
        RowLayout.of({"x": (np.dtype("f4"), ()), "y": (np.dtype(dtype), ())})


# -- checksums -----------------------------------------------------------------------------------------------------


def python_checksum(row: bytes, sample_id: int) -> int:
    """The checksum again, with Python's integers."""

    def step(h: int, word: int) -> int:
        h ^= word
        return ((h << 27 | h >> 37) & MASK) * 0x9E3779B97F4A7C15 & MASK

    whole = len(row) // 8
    words = [int.from_bytes(row[8 * i : 8 * i + 8], "little") for i in range(whole)]
    keys = np.random.PCG64(0x9E3779B97F4A7C15).random_raw(whole).tolist() if whole else []
    h = 0
    for word, key in zip(words, keys, strict=True):
        h += ((word ^ key) & 0xFFFFFFFF) * ((word ^ key) >> 32)
    h = step(h & MASK, sample_id)
    for byte in row[8 * whole :]:
        h = step(h, byte)
    h = step(h, 1)
    return (h ^ h >> 32) & 0xFFFFFFFF


@pytest.mark.parametrize("nbytes", [*ROW_SIZES, 5000])
def test_checksums_are_those_of_the_formula(nbytes: int) -> None:
    rows = random_rows(6, nbytes)
    sample_ids = np.array([0, 1, 5, 2**31, 2**40 + 3, 2**62])
    expected = [python_checksum(row.tobytes(), int(sample)) for row, sample in zip(rows, sample_ids, strict=True)]
    assert checksum_rows(rows, sample_ids).tolist() == expected
    # Strided and read-only rows have the checksums of their bytes.
    wide = random_rows(12, nbytes + 5)
    wide[::2, 2 : nbytes + 2] = rows
    wide.flags.writeable = False
    assert checksum_rows(wide[::2, 2 : nbytes + 2], sample_ids).tolist() == expected


@pytest.mark.parametrize("nbytes", ROW_SIZES)
def test_every_flipped_bit_and_every_other_sample_shows(nbytes: int) -> None:
    row = random_rows(1, nbytes, seed=nbytes)
    bits = 8 * nbytes
    flipped = np.repeat(row, bits + 1, axis=0)
    flipped[np.arange(bits), np.arange(bits) // 8] ^= np.uint8(1) << (np.arange(bits) % 8).astype(np.uint8)
    checksums = checksum_rows(flipped, np.full(bits + 1, 9))
    assert (checksums[:-1] != checksums[-1]).all()
    others = np.setdiff1d(np.arange(2000), [9])
    assert (checksum_rows(np.repeat(row, len(others), axis=0), others) != checksums[-1]).all()


def test_rows_without_bytes_have_checksums() -> None:
    a, b = checksum_rows(np.zeros((2, 0), np.uint8), np.array([3, 4]))
    assert a == python_checksum(b"", 3)
    assert a != b
    assert len(checksum_rows(np.zeros((0, 12), np.uint8), np.zeros(0, np.int64))) == 0


# -- moving rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", ROW_SIZES)
def test_rows_are_scattered_to_their_slots_and_nowhere_else(nbytes: int) -> None:
    slots, sample_ids = np.array([8, 0, 5, 3]), np.array([70, 10, 50, 30])
    arrived, before = random_rows(4, nbytes, seed=1), random_rows(9, nbytes, seed=2)
    arrived.flags.writeable = False
    rows = before.copy()
    assert scatter_verified(rows, slots, arrived, sample_ids, checksum_rows(arrived, sample_ids)) == -1
    expected = before.copy()
    expected[slots] = arrived
    np.testing.assert_array_equal(rows, expected)
    out = np.empty_like(arrived)
    gather_rows(rows, slots, out)
    np.testing.assert_array_equal(out, arrived)


@pytest.mark.parametrize("nbytes", ROW_SIZES)
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_the_first_bad_row_is_named_and_not_copied(nbytes: int, bad: int) -> None:
    slots, sample_ids = np.array([8, 0, 5, 3]), np.array([70, 10, 50, 30])
    arrived, before = random_rows(4, nbytes, seed=1), random_rows(9, nbytes, seed=2)
    checksums = checksum_rows(arrived, sample_ids)
    arrived[bad:, -1] ^= 0x40  # this row, and all after it
    rows = before.copy()
    assert scatter_verified(rows, slots, arrived, sample_ids, checksums) == bad
    expected = before.copy()
    expected[slots[:bad]] = arrived[:bad]
    np.testing.assert_array_equal(rows, expected)
