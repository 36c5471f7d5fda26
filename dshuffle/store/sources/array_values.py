"""What users pass as an array, and why some objects are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import dask.array as da
import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.store.sources.source import RowSource


def array_of(label: str, value: Any) -> Any:
    """The NumPy array, Dask array or source of rows that a value is, or that NumPy makes of it.

    Parameters
    ----------
    label
        Name of the parameter, for errors.
    value
        Array, or anything that :func:`numpy.asarray` accepts.

    Raises
    ------
    InvalidParameter
        If it is masked, sparse, of a dtype that NumPy does not have, or no array.

    Examples
    --------
    >>> array_of("x", [[1, 2], [3, 4]])
    array([[1, 2],
           [3, 4]])
    """
    block = value._meta if isinstance(value, da.Array) else value
    lazy = isinstance(value, da.Array)
    if isinstance(block, np.ma.MaskedArray) or _has_masked_items(value):
        hint = "Use dask.array.ma.filled(array)." if lazy else "Use its .filled() values."
        raise InvalidParameter.because(label, "it is a masked array", hint)
    if is_sparse(block):
        hint = "Use .map_blocks(lambda block: block.todense())." if lazy else "Make it dense with .toarray()."
        raise InvalidParameter.because(label, f"it is sparse ({type(block).__name__})", hint)
    if str(getattr(block, "dtype", "")).rpartition(".")[2] == "bfloat16":
        hint = 'Cast it to float32: .float() in PyTorch, .astype("float32") elsewhere.'
        raise InvalidParameter.because(label, "its dtype is bfloat16, which NumPy and Zarr do not have", hint)
    if lazy and not isinstance(block, np.ndarray):
        kind = f"{type(block).__module__}.{type(block).__name__}"
        hint = "Convert its blocks to NumPy arrays with .map_blocks()."
        raise InvalidParameter.because(label, f"the blocks of this Dask array are of type {kind}", hint)
    return value if lazy or isinstance(value, RowSource) else _as_numpy(label, value)


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix or array, of SciPy or of another library."""
    return isinstance(getattr(value, "nnz", None), int | np.integer) and hasattr(value, "todense")


def _has_masked_items(value: Any) -> bool:
    """Whether NumPy would drop masks of the items of a list."""
    return isinstance(value, list | tuple) and any(isinstance(item, np.ma.MaskedArray) for item in value)


def _as_numpy(label: str, value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, Mapping):  # such as a group of h5py, of which NumPy makes an array of names
        raise InvalidParameter.because(label, f"this {kind} is not an array", "Give each of its arrays a name.")
    try:
        array = np.asarray(value)
    except ValueError as exc:
        raise InvalidParameter.because(
            label, f"NumPy cannot convert this {kind} to an array ({exc})", "All samples must have the same shape."
        ) from exc
    except (TypeError, RuntimeError) as exc:  # tensors on a device, of other dtypes, or with gradients
        raise InvalidParameter.because(
            label, f"NumPy cannot convert this {kind} to an array ({exc})", "Convert it to a NumPy array."
        ) from exc
    if array.ndim == 0 and array.dtype.hasobject:
        raise InvalidParameter.because(label, f"this {kind} is not an array", _advice(value))
    return array


def _advice(value: Any) -> str:
    if isinstance(value, Iterator | Set):
        return "Make a list of it."
    if type(value).__module__.startswith("dask."):
        return "Make a Dask array of it (dask.array.from_delayed)."
    return "Give a NumPy or a Dask array."
