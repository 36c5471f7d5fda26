"""Tables and arrays of other libraries as sources: pandas, Arrow, Dask and xarray.

Except for Dask, these libraries are not imported here: whoever passes such an object has imported it.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from typing import Any

import dask.array as da
import dask.base
import numpy as np

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.sources.array_values import is_sparse
from dshuffle.store.sources.xarray_objects import Arrays, arrays_of_xarray


def arrays_of(data: Any) -> Arrays:
    """Return the arrays of what :func:`~dshuffle.store.create_dataset` accepts.

    Parameters
    ----------
    data
        A mapping of names to arrays, an ``xarray.Dataset`` or ``DataArray``, a DataFrame of pandas or Dask, or a table
        with the Arrow PyCapsule interface (pyarrow, Polars, DuckDB, ...).

    Raises
    ------
    InvalidParameter
        If it is none of these, or a column does not hold numbers.
    DatasetError
        If pyarrow is needed and not installed.

    Examples
    --------
    >>> arrays_of({"x": [1, 2]})
    ({'x': [1, 2]}, {}, {})
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    frames = libraries & {"pandas", "dask", "dask_expr"}  # others may compute their columns
    has_columns = bool(frames) and hasattr(getattr(data, "columns", None), "has_duplicates")
    skipped: dict[str, str] = {}
    arrays: dict[str, Any]
    dimensions: dict[str, tuple[str, ...]] = {}
    if "xarray" in libraries:
        arrays, skipped, dimensions = arrays_of_xarray(data)
    elif "pandas" in libraries and has_columns:
        arrays = {name: _of_series(name, data[name]) for name in _distinct(data.columns)}
        skipped = {str(name): "it is the index; reset_index() makes it a column" for name in data.index.names if name}
    elif has_columns:
        arrays = {name: _of_dask_series(name, data[name]) for name in _distinct(data.columns)}
    elif hasattr(data, "__arrow_c_stream__") and "pandas" not in libraries and not hasattr(data, "to_frame"):
        arrays = _of_arrow(data)
    elif isinstance(data, Mapping) and data:
        arrays = dict(data)
    else:
        allowed = "a mapping of at least one name to an array, a table or an xarray.Dataset"
        raise InvalidParameter.of("arrays", data, allowed, _advice(data, libraries))
    if not arrays and not isinstance(data, Mapping):
        raise InvalidParameter.because("arrays", f"this {type(data).__name__} has no columns", "Give at least one.")
    return _with_known_chunks(arrays), skipped, dimensions


def _advice(data: Any, libraries: set[str]) -> str:
    """What to do with an object that is none of the kinds that :func:`arrays_of` accepts."""
    kind = type(data).__name__
    if is_sparse(data):
        return "It is a sparse matrix; make it dense with .toarray(), and give it a name."
    if kind == "LazyFrame":
        return "Compute it with .collect()."
    if kind == "Series":
        return "Make a table of it with .to_frame()."
    if kind == "AnnData":
        return "Write it with .write_zarr(URL), and open that with open_dataset."
    if isinstance(data, str | os.PathLike) or "zarr" in libraries:
        return "What is stored is opened with open_dataset, or read with dshuffle.store.read_sources."
    if hasattr(data, "__array__") or isinstance(data, list | tuple):
        return 'Give the array a name: {"x": array}.'
    return ""


def _distinct(columns: Any) -> list[Any]:
    if columns.has_duplicates:
        raise InvalidParameter.of("columns", list(columns), "distinct")
    return list(columns)


def _of_series(name: Any, series: Any) -> Any:
    """The values of a column of pandas. Missing values of floats stay NaN."""
    dtype, label = series.dtype, f"column {name!r}"
    _refuse_time_zone(label, dtype)
    if str(dtype) == "category":
        hint = "Use its codes (.cat.codes), or leave it out."
        raise InvalidParameter.because(label, "it is categorical", hint)
    if dtype.type is str or getattr(dtype, "hasobject", False):  # strings have a dtype of their own since pandas 3
        hint = "Cast it to numbers or fixed-length strings (such as .astype('S8')), or leave it out."
        raise InvalidParameter.because(label, "its items are strings or other Python objects", hint)
    if isinstance(dtype, np.dtype):
        return series.to_numpy()
    kind = getattr(dtype, "numpy_dtype", np.dtype(object))
    if kind.hasobject:
        raise InvalidParameter.because(label, f"its dtype is {dtype}", "Cast it to a NumPy dtype, or leave it out.")
    if series.isna().any():
        raise InvalidParameter.because(label, "it contains nulls", "Fill the nulls, or leave the column out.")
    return series.to_numpy(kind)


def _of_dask_series(name: Any, series: Any) -> Any:
    """The values of a column of Dask."""
    _of_series(name, series._meta)
    if not isinstance(series.dtype, np.dtype):
        hint = "Cast it to a NumPy dtype (.astype), or leave it out."
        raise InvalidParameter.because(f"column {name!r}", f"its dtype is {series.dtype}", hint)
    return series.to_dask_array()


def _refuse_time_zone(label: str, dtype: Any) -> None:
    """Refuse times with a zone, of pandas or of Arrow in pandas."""
    if getattr(getattr(dtype, "pyarrow_dtype", dtype), "tz", None) is not None:
        hint = "NumPy's times have no zone. Use .dt.tz_convert(None) for times in UTC, or leave it out."
        raise InvalidParameter.because(label, f"its dtype is {dtype}", hint)


def _of_arrow(table: Any) -> dict[str, Any]:
    try:
        columns: dict[str, Any] = importlib.import_module("dshuffle.store.sources.parquet").table_arrays(table)
    except ImportError as exc:
        raise DatasetError(
            f"pyarrow is needed to read this table; install it with pip install 'dshuffle[parquet]' ({exc})"
        ) from exc
    return columns


def _with_known_chunks(arrays: dict[str, Any]) -> dict[str, Any]:
    """Compute Dask arrays whose chunks have unknown lengths, all of them once and together."""
    unknown = {n: a for n, a in arrays.items() if isinstance(a, da.Array) and any(math.isnan(s) for s in a.shape)}
    for name, array in zip(unknown, dask.base.persist(*unknown.values()), strict=True):
        arrays[name] = array.compute_chunk_sizes()
    return arrays
