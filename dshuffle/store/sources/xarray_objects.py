"""Datasets and data arrays of xarray as sources. xarray is not imported here: whoever passes an object has done so."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from dshuffle.errors import InvalidParameter

Arrays = tuple[dict[str, Any], dict[str, str], dict[str, tuple[str, ...]]]
"""Name -> array, name -> why something is not one of the arrays, and name -> dimensions, if they have names."""


def arrays_of_xarray(data: Any) -> Arrays:
    """The arrays of a ``Dataset``, ``DataArray``, or ``DataTree`` of one node. Dask arrays stay lazy.

    Of a dataset, these are the variables with the first dimension of the largest one; of a data array, itself and its
    coordinates along its first dimension. The dimension of samples moves to the front.

    Raises
    ------
    InvalidParameter
        If the object has no such variable, or is of another kind.
    """
    kind = type(data).__name__
    if children := getattr(data, "children", None):
        paths = sorted(map(str, children))
        hint = f"Give one of them, such as tree[{paths[0]!r}].to_dataset()."
        raise InvalidParameter.because("arrays", f"this {kind} has the groups {', '.join(paths)}", hint)
    if hasattr(data, "data_vars"):
        variables = [variable for variable in data.data_vars.values() if variable.ndim]
        largest = max(variables, key=lambda variable: variable.nbytes, default=None)
        if largest is None:
            raise InvalidParameter.because("arrays", f"this xarray.{kind} has no variables with a dimension")
        return _with_dimension(data.variables, largest.dims[0])
    if not hasattr(data, "coords"):
        hint = "Give an xarray.Dataset or DataArray."
        raise InvalidParameter.because("arrays", f"this xarray object is a {kind}", hint)
    if data.name is None:
        raise InvalidParameter.because("arrays", f"this xarray.{kind} has no name", 'Name it with .rename("x").')
    if not data.ndim:
        raise InvalidParameter.because("arrays", f"this xarray.{kind} has no dimension", "It must have one of samples.")
    coordinates = {name: coordinate.variable for name, coordinate in data.coords.items()}
    return _with_dimension({**coordinates, data.name: data.variable}, data.dims[0])


def _with_dimension(variables: Mapping[Hashable, Any], samples: Hashable) -> Arrays:
    arrays: dict[Any, Any] = {}
    skipped: dict[str, str] = {}
    dimensions: dict[Any, tuple[str, ...]] = {}
    for name, variable in variables.items():
        if samples not in variable.dims:
            dims = ", ".join(map(str, variable.dims)) or "it has no dimensions"
            skipped[str(name)] = f"its dimensions are {dims}, without {samples}" if variable.dims else dims
        elif not isinstance(variable.dtype, np.dtype):
            skipped[str(name)] = f"its dtype is {variable.dtype}"
        elif variable.dtype.kind == "O":
            skipped[str(name)] = "its items are Python objects, such as dates of another calendar or strings"
        elif variable.dtype.hasobject or variable.dtype.kind == "T":
            skipped[str(name)] = f"its items have different lengths ({variable.dtype})"
        else:
            turned = variable.transpose(samples, ...)
            arrays[name], dimensions[name] = turned.data, tuple(map(str, turned.dims))
    return arrays, skipped, dimensions
