"""The arrays in what users pass: mappings, tables of pandas, Arrow and Dask, and objects of xarray.

Except for Dask, these libraries are not imported here: whoever passes such an object has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import dask.array as da
import dask.base
import numpy as np

from dshuffle.checks import each
from dshuffle.errors import InvalidParameter
from dshuffle.store.sources import module_with_pyarrow
from dshuffle.store.sources.source import RowSource, complete

Arrays = tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, ...]]]
"""Name -> array, name -> why something is not one of the arrays, and name -> dimensions, if they have names."""

HINT = (
    'Give an array a name ({"x": array}), make a table of a Series (.to_frame()) or a LazyFrame (.collect()), and open '
    "what is stored with open_dataset or dshuffle.store.read_sources."
)


def arrays_of(data: Any) -> Arrays:
    """Return the arrays of what :func:`~dshuffle.store.create_dataset` accepts."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    skipped: dict[str, str] = {}
    dimensions: dict[str, tuple[str, ...]] = {}
    arrays: dict[str, Any]
    if "xarray" in libraries:
        arrays, skipped, dimensions = _of_xarray(data)
    elif libraries & {"pandas", "dask", "dask_expr"} and hasattr(getattr(data, "columns", None), "has_duplicates"):
        if data.columns.has_duplicates:
            raise InvalidParameter.of("columns", list(data.columns), "distinct")
        arrays = each(data.columns, lambda name: _of_series(f"column {name!r}", data[name]))
        if "pandas" in libraries:
            skipped = {str(n): "it is the index; reset_index() makes it a column" for n in data.index.names if n}
    elif hasattr(data, "__arrow_c_stream__") and not hasattr(data, "to_frame"):  # as a Series has it
        arrays = module_with_pyarrow().table_arrays(data)
    elif isinstance(data, Mapping) and data:
        arrays = dict(data)
    else:
        raise InvalidParameter.of(
            "arrays", data, "a mapping of at least one name to an array, a table or an xarray.Dataset", HINT
        )
    if not arrays and "xarray" not in libraries:
        raise InvalidParameter.because("arrays", f"this {type(data).__name__} has no columns", "Give at least one.")
    # Dask arrays whose chunks have unknown lengths are computed once and together.
    unknown = {n: a for n, a in arrays.items() if isinstance(a, da.Array) and any(math.isnan(s) for s in a.shape)}
    for name, array in zip(unknown, dask.base.persist(*unknown.values()), strict=True):
        arrays[name] = array.compute_chunk_sizes()
    return arrays, skipped, dimensions


def array_of(label: str, value: Any) -> Any:
    """The NumPy array, Dask array or source of rows that a value is, or that NumPy makes of it."""
    if isinstance(value, RowSource):
        return value
    kind, is_lazy = type(value).__name__, isinstance(value, da.Array)
    parts = [value._meta] if is_lazy else [value, *value] if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise InvalidParameter.because(label, "it is a masked array", "Fill it with .filled() or dask.array.ma.filled.")
    if is_lazy:
        if not isinstance(value._meta, np.ndarray):
            blocks = f"{type(value._meta).__module__}.{type(value._meta).__name__}"
            hint = "Convert its blocks to NumPy arrays with .map_blocks()."
            raise InvalidParameter.because(label, f"the blocks of this Dask array are of type {blocks}", hint)
        return value
    if isinstance(value, Mapping):  # such as a group of h5py, of which NumPy makes an array of names
        raise InvalidParameter.because(label, f"this {kind} is not an array", "Give each of its arrays a name.")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as exc:  # also tensors on a device, of other dtypes, or with gradients
        hint = "Convert it to an array of NumPy, in which all samples have the same shape."
        raise InvalidParameter.because(label, f"NumPy cannot convert this {kind} to an array ({exc})", hint) from exc
    if array.ndim == 0 and array.dtype.hasobject:
        if isinstance(getattr(value, "nnz", None), int | np.integer):
            raise InvalidParameter.because(label, f"it is sparse ({kind})", "Make it dense with .toarray().")
        hint = "Make a list, a dense NumPy array or a Dask array of it."
        raise InvalidParameter.because(label, f"this {kind} is not an array", hint)
    return array


def _of_series(label: str, series: Any) -> Any:
    """The values of a column, of which none may be missing. Arrow converts those that NumPy does not have."""
    is_numpy = isinstance(series.dtype, np.dtype) and not series.dtype.hasobject
    if not hasattr(series, "to_dask_array"):
        if is_numpy:
            return complete(label, series.to_numpy())
        return module_with_pyarrow().column_array(label, series)
    if not is_numpy:
        hint = "Cast it to a NumPy dtype of numbers (.astype, .cat.codes), or leave it out."
        raise InvalidParameter.because(label, f"its dtype is {series.dtype}", hint)
    return series.to_dask_array().map_blocks(partial(complete, label), dtype=series.dtype)


def _of_xarray(data: Any) -> Arrays:
    """The arrays of a ``Dataset``, ``DataArray``, or ``DataTree`` of one node. Dask arrays stay lazy.

    Of a dataset, these are the variables with the first dimension of the largest one; of a data array, itself and its
    coordinates along its first dimension. The dimension of samples moves to the front.
    """
    whole = isinstance(getattr(data, "data_vars", None), Mapping)  # a Dataset or a node of a DataTree
    if not whole and not hasattr(data, "coords"):
        raise InvalidParameter.of("arrays", data, "an xarray.Dataset or DataArray")
    variables = data.data_vars.values() if whole else [data.variable]
    main = max(variables, key=lambda variable: variable.nbytes if variable.ndim else -1, default=None)
    groups = [f"Give one of them, such as tree[{name!r}]." for name in getattr(data, "children", ())]
    if main is None or not main.ndim or groups:
        reason = f"this {type(data).__name__} has " + ("groups" if groups else "no variables with a dimension")
        raise InvalidParameter.because("arrays", reason, "".join(groups[:1]))
    if whole:
        return _along(data.variables, main.dims[0])
    if data.name is None:
        raise InvalidParameter.because("arrays", "this DataArray has no name", 'Name it with .rename("x").')
    coordinates = {name: coordinate.variable for name, coordinate in data.coords.items()}
    return _along({**coordinates, data.name: main}, main.dims[0])


def _along(variables: Mapping[Hashable, Any], samples: Hashable) -> Arrays:
    arrays: dict[Any, Any] = {}
    skipped: dict[str, str] = {}
    dimensions: dict[Any, tuple[str, ...]] = {}
    for name, variable in variables.items():
        dtype = variable.dtype
        if samples not in variable.dims:
            dims = ", ".join(map(str, variable.dims)) or "it has no dimensions"
            skipped[str(name)] = f"its dimensions are {dims}, without {samples}" if variable.dims else dims
        elif not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.kind == "T":
            skipped[str(name)] = f"its items are not of a dtype of NumPy with a fixed size ({dtype})"
        else:
            turned = variable.transpose(samples, ...)
            arrays[name], dimensions[name] = turned.data, tuple(map(str, turned.dims))
    return arrays, skipped, dimensions
