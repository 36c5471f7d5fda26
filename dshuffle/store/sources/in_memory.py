"""Tables and arrays of other libraries as sources: pandas, Arrow, Dask and xarray.

Except for Dask, these libraries are not imported here: whoever passes such an object has imported it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import dask.array as da
import dask.base
import numpy as np

from dshuffle.errors import DatasetError, InvalidParameter

Arrays = tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, ...]]]
"""Name -> array, name -> why something is not one of the arrays, and name -> dimensions, if they have names."""


def arrays_of(data: Any) -> Arrays:
    """Return the arrays of what :func:`~dshuffle.store.create_dataset` accepts.

    Parameters
    ----------
    data
        A mapping of names to arrays, an ``xarray.Dataset``, a DataFrame of pandas or Dask, or a table with the Arrow
        PyCapsule interface (pyarrow, Polars, DuckDB, ...).

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
    has_columns, skipped = hasattr(getattr(data, "columns", None), "has_duplicates"), dict[str, str]()
    arrays: dict[str, Any]
    dimensions: dict[str, tuple[str, ...]] = {}
    if "xarray" in libraries and hasattr(data, "data_vars"):
        arrays, skipped, dimensions = _of_xarray(data)
    elif "pandas" in libraries and has_columns:
        arrays = {name: _of_series(name, data[name]) for name in _distinct(data.columns)}
        skipped = {str(name): "it is the index; reset_index() makes it a column" for name in data.index.names if name}
    elif libraries & {"dask", "dask_expr"} and has_columns:
        arrays = {name: data[name].to_dask_array() for name in _distinct(data.columns)}
    elif hasattr(data, "__arrow_c_stream__") and "pandas" not in libraries:
        arrays = _of_arrow(data)
    elif isinstance(data, Mapping) and data:
        arrays = dict(data)
    else:
        raise InvalidParameter.of(
            "arrays", data, "a mapping of at least one name to an array, a table or an xarray.Dataset"
        )
    if not arrays and not isinstance(data, Mapping):
        raise InvalidParameter.because("arrays", f"this {type(data).__name__} has no columns", "Give at least one.")
    return _with_known_chunks(arrays), skipped, dimensions


def _distinct(columns: Any) -> list[Any]:
    if columns.has_duplicates:
        raise InvalidParameter.of("columns", list(columns), "distinct")
    return list(columns)


def _of_series(name: Any, series: Any) -> Any:
    """The values of a column of pandas. Missing values of floats stay NaN."""
    dtype, label = series.dtype, f"column {name!r}"
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


def _of_arrow(table: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = importlib.import_module("dshuffle.store.sources.parquet").table_arrays(table)
    except ImportError as exc:
        raise DatasetError(
            f"pyarrow is needed to read this table; install it with pip install 'dshuffle[parquet]' ({exc})"
        ) from exc
    return found


def _of_xarray(dataset: Any) -> Arrays:
    """The variables with the first dimension of the largest one, which moves to the front; Dask arrays stay lazy."""
    arrays: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    dimensions: dict[str, tuple[str, ...]] = {}
    largest = max((one for one in dataset.data_vars.values() if one.ndim), key=lambda one: one.nbytes, default=None)
    if largest is None:
        raise InvalidParameter.because("arrays", "this xarray.Dataset has no variables with a dimension")
    samples = largest.dims[0]
    for name, variable in dataset.variables.items():
        if samples not in variable.dims:
            dims = ", ".join(map(str, variable.dims)) or "it has no dimensions"
            skipped[str(name)] = f"its dimensions are {dims}, without {samples}" if variable.dims else dims
        elif not isinstance(variable.dtype, np.dtype):
            skipped[str(name)] = f"its dtype is {variable.dtype}"
        elif variable.dtype.hasobject or variable.dtype.kind in "OT":
            skipped[str(name)] = f"its items have different lengths ({variable.dtype})"
        else:
            turned = variable.transpose(samples, ...)
            arrays[name], dimensions[name] = turned.data, tuple(map(str, turned.dims))
    return arrays, skipped, dimensions


def _with_known_chunks(arrays: dict[str, Any]) -> dict[str, Any]:
    """Compute Dask arrays whose chunks have unknown lengths, all of them once and together."""
    unknown = {n: a for n, a in arrays.items() if isinstance(a, da.Array) and any(math.isnan(s) for s in a.shape)}
    for name, array in zip(unknown, dask.base.persist(*unknown.values()), strict=True):
        arrays[name] = array.compute_chunk_sizes()
    return arrays
