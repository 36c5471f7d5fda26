"""How many rows the chunks have that the assignment ``chunks`` deals out.

What plans need of a dataset, its labels and stored shardings: found by every member of a session for itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning import (
    SHARDINGS,
    Assignment,
    Chunks,
    Classes,
    GivenSharding,
    ShufflePlanSpec,
    stratified_assignment,
)
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, read_array, read_broadcast, read_sharding, stored_shardings


def with_chunks_of(dataset: Dataset, assignment: Assignment) -> Assignment:
    """The assignment, with the dataset's chunks where it is ``chunks`` and says nothing of their size."""
    return Chunks(unit_rows(dataset)) if assignment == Chunks() else assignment


def unit_rows(dataset: Dataset) -> int:
    """Samples in a chunk of the array with the widest rows; of several such arrays the most.

    It is nearly all of what is read. Other arrays may be in other chunks (a column of labels is often a single one):
    those of their chunks that belong to several workers are read by each, which costs little where rows are narrow.
    Of a sharded array the inner chunks count, since they can be read one by one.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> arrays = {"x": np.zeros((2000, 1024)), "y": np.zeros(2000)}
    >>> dataset = create_dataset("memory://doc-unit-rows", arrays, overwrite=True)
    >>> {name: info.chunk_rows for name, info in dataset.arrays.items()}
    {'x': 512, 'y': 2000}
    >>> unit_rows(dataset)
    512
    """
    widths = ((info.dtype.itemsize * math.prod(info.shape), info.chunk_rows) for info in dataset.arrays.values())
    return max(widths)[1]


STRATIFIED = "stratified:"
"""With what the name begins of a sharding by labels; it ends with the name of their array."""


def wanted_sharding(dataset: Dataset, sharding: str | Sharding | ArrayLike) -> str | GivenSharding:
    """What a user asked for, checked as far as the client can without reading labels.

    Ranks stored beside the dataset are read here once, for their shape and checksum, and travel by name.

    Raises
    ------
    InvalidParameter
        If there is no such sharding, or no such labels, or ranks are no balanced assignment.
    """
    if not isinstance(sharding, str):
        if isinstance(sharding, Sharding):
            given = GivenSharding.of("given", sharding.ranks, sharding.broadcast)
        else:
            given = GivenSharding.of("given", sharding)
        assert given.n_workers is not None
        given.check(dataset.n_samples, given.n_workers)
        return given
    if sharding in SHARDINGS:
        return sharding
    if sharding.startswith(STRATIFIED):
        _check_labels(dataset, sharding)
        return GivenSharding(sharding)
    stored = stored_shardings(dataset)
    if sharding in stored:
        ranks, broadcast = read_sharding(dataset, sharding), read_broadcast(dataset, sharding)
        return GivenSharding.of(sharding, ranks, broadcast).by_name()
    hint = "Make one with 'dshuffle shard --write', or give 'stratified:LABELS' or an array of ranks."
    raise InvalidParameter.of("sharding", sharding, f"one of {[*sorted(SHARDINGS), *stored]}", hint)


def wanted_balance(dataset: Dataset, balance: str | None) -> Classes | None:
    """The classes that a user wants to stay in equal parts.

    Labels are read here once, to be checked and for their checksum; like ranks they travel by name.

    Raises
    ------
    InvalidParameter
        If there are no such labels, or they are no classes.
    """
    if balance is None:
        return None
    if balance not in (labels := _label_arrays(dataset)):
        hint = "Labels are an array of one integer a sample" + ("." if labels else ", and this dataset has none.")
        raise InvalidParameter.of("balance", balance, f"None, or one of {labels}" if labels else "None", hint)
    return Classes.of(balance, read_labels(dataset, balance), dataset.n_samples)


def warn_of_small_classes(classes: Classes, n_workers: int, stacklevel: int = 2) -> None:
    """Say how many classes are too small for every worker to get some of them."""
    sizes = np.diff(classes.members()[1])
    small = sizes[sizes < n_workers]
    if len(small):
        warnings.warn(
            f"balance={classes.name!r}: {len(small)} of {len(sizes)} classes have fewer samples than there are workers "
            f"({n_workers}), some of which get none of them in an epoch; the smallest has {small.min()}",
            ShardingWarning,
            stacklevel=stacklevel + 1,
        )


def with_data(plan: ShufflePlanSpec, dataset: Dataset) -> ShufflePlanSpec:
    """The plan, with labels, and with the ranks of its first epoch, where it had their names only.

    Raises
    ------
    InvalidParameter
        If labels are no classes, they or stored ranks are not those any more that the client saw, or the first
        assignment does not have the balance that is wanted.
    """
    labels = functools.cache(lambda name: read_labels(dataset, name))  # the same array may be wanted twice
    balance = plan.balance
    if balance is not None:
        plan = dataclasses.replace(plan, balance=balance.found(labels(balance.name), plan.n_samples))
    given = plan.sharding
    if isinstance(given, GivenSharding) and given.ranks is None:
        if given.name.startswith(STRATIFIED):
            found = labels(given.name.removeprefix(STRATIFIED))
            ranks = stratified_assignment(found, plan.n_workers, seed=plan.seed, n_samples=plan.n_samples)
            given = given.found(ranks)
        else:
            given = given.found(read_sharding(dataset, given.name), read_broadcast(dataset, given.name))
        plan = dataclasses.replace(plan, sharding=given)
    if balance is not None:
        plan.of_dealt().first_assignment()  # refused now, not when the first epoch is planned
    return plan


def read_labels(dataset: Dataset, name: str) -> NDArray[np.generic]:
    """``(q,)``: one of a dataset's arrays, whole."""
    return read_array(dataset, name)[: dataset.n_samples]


def _check_labels(dataset: Dataset, sharding: str) -> None:
    if sharding.removeprefix(STRATIFIED) not in _label_arrays(dataset):
        known = _label_arrays(dataset)
        hint = f"Labels are an array of one integer a sample{'' if known else ', and this dataset has none'}."
        raise InvalidParameter.of("sharding", sharding, f"'stratified:' and one of {known}", hint)


def _label_arrays(dataset: Dataset) -> list[str]:
    return [name for name, info in dataset.arrays.items() if not info.shape and info.dtype.kind in "iub"]
