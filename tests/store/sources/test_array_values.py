"""Objects that are no arrays: what the error says of each kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import xarray as xr

import dshuffle
from dshuffle.errors import InvalidParameter

X = np.arange(6.0).reshape(3, 2)
MASKED = np.ma.masked_equal([1, 2], 1)
SPARSE = scipy.sparse.csr_matrix(X)
LAZY_SPARSE = da.from_array(X, chunks=2).map_blocks(scipy.sparse.csr_matrix, meta=scipy.sparse.csr_matrix((0, 0)))


class OtherArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A block of Dask that is not one of NumPy, as those of CuPy."""

    ndim, shape, dtype = 1, (0,), np.dtype("f8")

    def __array_function__(self, *args: Any) -> Any:
        return NotImplemented

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented

    def __getitem__(self, index: Any) -> Any:
        return self

    def __len__(self) -> int:
        return 0


OF_OTHERS = da.Array({("x", 0): OtherArray()}, "x", ((3,),), meta=OtherArray())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (MASKED, r"it is a masked array. Fill it with \.filled\(\)"),
        (da.ma.masked_equal(da.from_array(X, chunks=2), 1), "it is a masked array.*dask.array.ma.filled"),
        (SPARSE, r"it is sparse \(csr_matrix\)"),
        (LAZY_SPARSE, r"the blocks of this Dask array are of type scipy.*csr_matrix. .*\.map_blocks\("),
        (OF_OTHERS, r"the blocks of this Dask array are of type .*OtherArray"),
        ((number for number in range(3)), "this generator is not an array. Make a list"),
        ({"y": [1]}, "this dict is not an array. Give each of its arrays a name"),
        (dask.delayed(np.ones)(3), "this Delayed is not an array.*a Dask array of it"),
        (None, "this NoneType is not an array"),
        ([[1], [2, 3]], "NumPy cannot convert this list.*same shape"),
        (pd.date_range("2000", periods=2, tz="UTC"), "Cast it to numbers"),
    ],
)
def test_a_value_that_is_no_array(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{words}"):
        dshuffle.create_dataset(tmp_path / "d", {"x": value})
    assert not os.listdir(tmp_path)


TREE = xr.DataTree.from_dict({"/train": xr.Dataset({"x": ("t", [1])}), "/test": xr.Dataset({"x": ("t", [1])})})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (X, r'Give an array a name \(\{"x": array\}\)'),
        (pd.Series([1, 2]), r"make a table of a Series \(\.to_frame\(\)\)"),
        (dd.from_pandas(pd.Series([1, 2]), npartitions=1), r"\.to_frame\(\)"),
        ("data.npy", "open what is stored with open_dataset"),
        (dshuffle.create_dataset("memory://test-no-array", {"x": X}), "open_dataset or dshuffle.store.read_sources"),
        (TREE, r"this DataTree has groups. Give one of them, such as tree\['train'\]"),
        (xr.DataArray(X), r'this DataArray has no name. Name it with \.rename\("x"\)'),
        (xr.DataArray(3.0, name="x"), "this DataArray has no variables with a dimension"),
        (xr.Variable("t", [1]), "must be an xarray.Dataset or DataArray"),
        ({}, "a mapping of at least one name"),
    ],
)
def test_an_object_that_is_no_table(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        dshuffle.create_dataset(tmp_path / "d", data)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pd.array([1, 2], dtype="Int64"), "its dtype is Int64. Cast it to a NumPy dtype"),
        (pd.Categorical(["a", "b"]), r"its dtype is category.*\.cat\.codes"),
    ],
)
def test_columns_of_dask_that_do_not_hold_numbers(tmp_path: Path, column: Any, words: str) -> None:
    frame = dd.from_pandas(pd.DataFrame({"a": column}), npartitions=1)
    with pytest.raises(InvalidParameter, match=f"column 'a'.*{words}"):
        dshuffle.create_dataset(tmp_path / "d", frame)


def test_a_group_of_an_hdf5_file_is_no_array(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        np.testing.assert_array_equal(dshuffle.create_dataset(None, file).read_rows([2, 0])["x"], X[[2, 0]])
        file.create_group("below")["y"] = X
        with pytest.raises(InvalidParameter, match=r"arrays\['below'\].*this Group is not an array"):
            dshuffle.create_dataset(tmp_path / "d", file)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_data_array_is_stored_with_its_coordinates(tmp_path: Path, lazy: bool) -> None:
    times = np.arange(3).astype("M8[D]").astype("M8[ns]")
    array = xr.DataArray(
        X, dims=("time", "k"), coords={"time": times, "k": [5, 6], "flag": ("time", [1, 0, 1])}, name="v"
    )
    dataset = dshuffle.create_dataset(tmp_path / "d", array.chunk() if lazy else array)
    assert set(dataset.arrays) == {"v", "time", "flag"}
    assert "without time" in dataset.skipped["k"]
    read = dataset.read_rows([2, 0])
    np.testing.assert_array_equal(read["v"], X[[2, 0]])
    np.testing.assert_array_equal(read["time"], times[[2, 0]])
    turned = dshuffle.create_dataset(tmp_path / "turned", array.transpose("k", "time"))
    np.testing.assert_array_equal(turned.read_rows([1])["v"], X.T[[1]])
    only = dshuffle.create_dataset(tmp_path / "only", array["time"])
    np.testing.assert_array_equal(only.read_rows([1])["time"], times[[1]])


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_dtypes_of_other_libraries(tmp_path: Path, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.ones(3, getattr(ml_dtypes, name))
    for value in (values, da.from_array(values)):
        with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{name}.*Cast it to"):
            dshuffle.create_dataset(tmp_path / "d", {"x": value})


def test_tensors_that_numpy_cannot_hold(tmp_path: Path, torch: Any) -> None:
    for value, words in {
        torch.ones(3, dtype=torch.bfloat16): "NumPy cannot convert this Tensor.*BFloat16",
        torch.ones(3, requires_grad=True): r"NumPy cannot convert this Tensor.*detach\(\)",
        torch.ones(3, 2).to_sparse(): "NumPy cannot convert this Tensor.*Sparse",
        torch.ones(3, device="meta"): "NumPy cannot convert this Tensor.*meta",
    }.items():
        with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{words}"):
            dshuffle.create_dataset(tmp_path / "d", {"x": value})
    found = dshuffle.create_dataset(tmp_path / "d", {"x": torch.arange(6.0).reshape(3, 2)})
    np.testing.assert_array_equal(found.read_rows([2, 0])["x"], X[[2, 0]])


def test_polars(tmp_path: Path) -> None:
    class LazyFrame:
        @property
        def columns(self) -> Any:
            raise AssertionError("Polars computes these")

    class Series:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            raise AssertionError("this is no table")

        def to_frame(self) -> Any: ...

    for data, words in ((LazyFrame(), r"\.collect\(\)"), (Series(), r"\.to_frame\(\)")):
        with pytest.raises(InvalidParameter, match=words):
            dshuffle.create_dataset(tmp_path / "d", data)
