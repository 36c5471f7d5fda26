"""Which arrays of a Zarr group are arrays of samples, and along which axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zarr
from zarr import Array, Group
from zarr.core.sync import sync

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.cf import DIMENSIONS

ANNDATA = ("obs", "obsm", "layers")
"""Groups of an AnnData store whose arrays have a row for each observation."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks for when a group is opened.

    Parameters
    ----------
    arrays
        Names of arrays, or their paths below the group. None for all that have the sample dimension.
    sample_dim
        Name or number of the sample dimension. None for the first dimension of the largest array.
    decode
        Whether scale, offset, missing values and times are applied.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.
    """

    arrays: str | Sequence[str] | None = None
    sample_dim: str | int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        if self.arrays is not None:
            names = (self.arrays,) if isinstance(self.arrays, str) else tuple(self.arrays)
            if not names or not all(isinstance(name, str) and name.strip("/") for name in names):
                raise InvalidParameter.of("arrays", self.arrays, "None, or names of arrays")
            object.__setattr__(self, "arrays", tuple(dict.fromkeys(name.strip("/") for name in names)))
        if not isinstance(self.sample_dim, str | None):
            object.__setattr__(self, "sample_dim", as_integer("sample_dim", self.sample_dim, 0))
        if not isinstance(self.decode, bool):
            raise InvalidParameter.of("decode", self.decode, "True or False")


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """The arrays of samples of a group.

    Parameters
    ----------
    arrays
        Name -> array.
    axes
        Name -> axis of the samples.
    skipped
        Name -> why the array is not one of them.
    """

    arrays: Mapping[str, Array[Any]]
    axes: Mapping[str, int]
    skipped: Mapping[str, str]

    @property
    def n_samples(self) -> int:
        """Length of the sample dimension."""
        return next(self.arrays[name].shape[axis] for name, axis in self.axes.items())


def find_arrays(group: Group, url: str, wanted: Wanted) -> SampleArrays:
    """Find the arrays of samples.

    Raises
    ------
    InvalidParameter
        If no array has the name or the dimension that is asked for.
    DatasetError
        If there are none, or those that are asked for differ in length.
    """
    found, skipped = _named(group, wanted.arrays) if wanted.arrays is not None else _all(group)
    for name in list(found):
        if reason := unreadable_items(found[name]):
            skipped[name] = reason
            del found[name]
    axes, others = _axes(found, wanted.sample_dim)
    skipped |= others
    if wanted.arrays is not None and skipped:
        raise DatasetError(f"these arrays of {url} cannot be opened together: {_listed(skipped)}")
    if not axes:
        reasons = f": {_listed(skipped)}" if skipped else ""
        if isinstance(wanted.sample_dim, str) and found:
            names = sorted({str(name) for array in found.values() for name in dimensions(array) or ()})
            raise InvalidParameter.of("sample_dim", wanted.sample_dim, f"one of the dimensions of {url}: {names}")
        raise DatasetError(f"the Zarr group at {url} has no arrays of samples{reasons}")
    return SampleArrays({name: found[name] for name in sorted(axes)}, axes, dict(sorted(skipped.items())))


def dimensions(array: Array[Any]) -> tuple[str | None, ...] | None:
    """Names of the dimensions of an array; None if they have none."""
    names: Any = getattr(array.metadata, "dimension_names", None) or array.attrs.get(DIMENSIONS)
    if not isinstance(names, Sequence) or len(names) != array.ndim or not any(names):
        return None
    return tuple(name if isinstance(name, str) else None for name in names)


def _axes(found: Mapping[str, Array[Any]], sample_dim: str | int | None) -> tuple[dict[str, int], dict[str, str]]:
    """The axis of the samples of each array, and why other arrays have none."""
    axes: dict[str, int] = {}
    skipped: dict[str, str] = {}
    if not found:
        return axes, skipped
    axis = sample_dim if isinstance(sample_dim, int) else 0
    has_axis = [name for name, array in found.items() if array.ndim > axis] or list(found)
    main = max(has_axis, key=lambda name: (found[name].nbytes, found[name].ndim, name))
    wanted: str | None = sample_dim if isinstance(sample_dim, str) else None
    length: int | None = None
    if wanted is None and found[main].ndim > axis:
        names = dimensions(found[main])
        wanted, length = None if names is None else names[axis], found[main].shape[axis]
    for name, array in found.items():
        names = dimensions(array)
        if wanted is not None and names is not None:
            if wanted not in names:
                skipped[name] = f"its dimensions are {', '.join(map(str, names))}, without {wanted}"
                continue
            axis = names.index(wanted)
        elif isinstance(sample_dim, str):
            skipped[name] = "its dimensions have no names"
            continue
        else:
            axis = sample_dim or 0
            if array.ndim <= axis:
                skipped[name] = f"it has no axis {axis}"
                continue
        if length is None:
            length = array.shape[axis]
        if array.shape[axis] != length:
            skipped[name] = f"its length is {array.shape[axis]}, not {length} as that of {main}"
            continue
        axes[name] = axis
    return axes, skipped


def unreadable_items(array: Array[Any]) -> str:
    """Why the items of an array cannot be part of a row; empty if they can."""
    if array.ndim == 0:
        return "it is a scalar"
    dtype = array.dtype
    if dtype.hasobject or dtype.kind in "OT":
        return f"its items have different lengths ({dtype})"
    return ""


def _named(group: Group, names: Sequence[str]) -> tuple[dict[str, Array[Any]], dict[str, str]]:
    found: dict[str, Array[Any]] = {}
    for name in names:
        try:
            node = group[name]
        except KeyError:
            hint = f"It has {', '.join(sorted(_children(group)[0]))}."
            raise InvalidParameter.of("arrays", name, "the name of an array of the group", hint) from None
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(f"zarr cannot open array {name} ({type(error).__name__}: {error})") from error
        if not isinstance(node, Array):
            raise DatasetError(f"{name} is not an array: {_kind_of_group(name, node)}")
        found[name] = node
    return found, {}


def _all(group: Group) -> tuple[dict[str, Array[Any]], dict[str, str]]:
    """All arrays directly below a group; of an AnnData store, also those with a row for each observation."""
    found, skipped, groups = _children(group)
    if group.attrs.get("encoding-type") != "anndata":
        return found, skipped
    for name, node in groups.items():
        if name not in ANNDATA:
            skipped[name] = _kind_of_group(name, node)
            continue
        below, reasons, inner = _children(node)
        found |= {f"{name}/{key}": array for key, array in below.items()}
        skipped |= {f"{name}/{key}": reason for key, reason in reasons.items()}
        skipped |= {f"{name}/{key}": _kind_of_group(f"{name}/{key}", one) for key, one in inner.items()}
    index = group["obs"].attrs.get("_index") if "obs" in groups else None
    n_observations = next((found[name].shape[0] for name in (f"obs/{index}", "X") if name in found), None)
    # The largest array does not decide here: X may be longer along its other axis.
    for name, array in list(found.items()):
        if n_observations is not None and (array.ndim == 0 or array.shape[0] != n_observations):
            skipped[name] = f"it does not have a row for each of the {n_observations} observations"
            del found[name]
    return found, skipped


def _kind_of_group(name: str, node: Group) -> str:
    kind = node.attrs.get("encoding-type", "group")
    if kind in ("csr_matrix", "csc_matrix"):
        return f"it is a {kind}, and rows of different lengths cannot be read. Store it as a dense array"
    if kind == "categorical":
        return f'it is categorical. Open its codes by name: arrays=["{name}/codes", ...]'
    return f"it is a {kind}"


def _children(group: Group) -> tuple[dict[str, Array[Any]], dict[str, str], dict[str, Group]]:
    """Arrays, what cannot be opened and why, and groups directly below a group."""
    found: dict[str, Array[Any]] = {}
    skipped: dict[str, str] = {}
    groups: dict[str, Group] = {}
    try:
        members = dict(group.members())
    except Exception:  # one of them has metadata that zarr does not understand
        members = {}
        for name in sync(_names(group)):
            try:
                members[name] = group[name]
            except KeyError:  # not a node
                continue
            except Exception as error:
                skipped[name] = f"zarr cannot open it ({type(error).__name__}: {error})"
    for name, node in sorted(members.items()):
        if isinstance(node, zarr.Array):
            found[name] = node
        else:
            groups[name] = node
    return found, skipped, groups


async def _names(group: Group) -> list[str]:
    return sorted([name async for name in group.store.list_dir(group.path)])


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
