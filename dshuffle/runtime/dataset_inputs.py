"""Inputs of a plan that come from the dataset: chunk sizes, labels and stored shardings.

Each participant of a session reads labels and shardings itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning import SHARDINGS, Assignment, Choices, Classes, GivenSharding, ShuffleSpec
from dshuffle.planning.assignment.balance import stratified_ranks
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, read_array, read_sharding, stored_shardings


def resolved(dataset: Dataset, choices: Choices) -> Choices:
    """Look up in a dataset what the choices leave open: the size of its chunks, and named shardings and labels.

    Labels are read here once, to check them and for their checksum. Only their name is sent to the workers.
    """
    balance = choices.balance
    if balance is not None:
        _check_labels(dataset, "balance", balance.name, "None, or")
        balance = Classes.of(balance.name, read_labels(dataset, balance.name), dataset.n_samples)
    return dataclasses.replace(
        choices,
        assignment=with_chunks_of(dataset, choices.assignment),
        sharding=checked_sharding(dataset, choices.sharding),
        balance=balance,
    )


def with_chunks_of(dataset: Dataset, assignment: Assignment) -> Assignment:
    """Fill in the dataset's chunk size if the assignment moves chunks and has no size."""
    return assignment.with_unit(unit_rows(dataset)) if assignment.unit is None else assignment


def unit_rows(dataset: Dataset) -> int:
    """Number of samples per chunk of the array with the widest rows. If several are equally wide, take the largest.

    This array is most of the data that is read. Other arrays may have other chunks (labels are often a single chunk).
    If one of their chunks belongs to several workers, each of them reads it, which is cheap for narrow rows. For a
    sharded array the inner chunks count, because they can be read one by one.
    """
    widths = ((info.dtype.itemsize * math.prod(info.shape), info.chunk_rows) for info in dataset.arrays.values())
    return max(widths)[1]


STRATIFIED = "stratified:"
"""Prefix of the name of a sharding by labels. The name of the label array follows."""


def checked_sharding(dataset: Dataset, sharding: str | GivenSharding | Sharding | ArrayLike) -> str | GivenSharding:
    """Check the requested sharding as far as possible without reading labels.

    Stored ranks are read here once, for their shape and checksum. Only their name is sent to the workers.
    """
    if isinstance(sharding, GivenSharding):
        return sharding  # it has been checked already
    if isinstance(sharding, str):
        if sharding in SHARDINGS:
            return sharding
        if sharding.startswith(STRATIFIED):
            _check_labels(dataset, "sharding", sharding, "'stratified:' followed by")
            return GivenSharding(sharding)
        stored = stored_shardings(dataset)
        if sharding in stored:
            ranks, broadcast = read_sharding(dataset, sharding), read_sharding(dataset, sharding, "broadcast")
            return GivenSharding.of(sharding, ranks, broadcast).by_name()
        hint = "Store a sharding with dshuffle.store.write_sharding, or give 'stratified:LABELS' or an array of ranks."
        raise InvalidParameter.of("sharding", sharding, f"one of {[*sorted(SHARDINGS), *stored]}", hint)
    if isinstance(sharding, Sharding):
        fixed = GivenSharding.of("given", sharding.ranks, sharding.broadcast)
    elif np.ndim(sharding):
        fixed = GivenSharding.of("given", sharding)
    else:
        raise InvalidParameter.of("sharding", sharding, f"one of {sorted(SHARDINGS)}, a Sharding, or (q,) ranks")
    assert fixed.n_workers is not None
    fixed.check(dataset.n_samples, fixed.n_workers)
    return fixed


def _check_labels(dataset: Dataset, parameter: str, value: object, allowed: str) -> None:
    names = [name for name, info in dataset.arrays.items() if not info.shape and info.dtype.kind in "iub"]
    if str(value).removeprefix(STRATIFIED) not in names:
        hint = "Labels are an array with one integer per sample."
        raise InvalidParameter.of(parameter, value, f"{allowed} one of {names}", hint)


def warn_of_small_classes(classes: Classes, n_workers: int, stacklevel: int = 2) -> None:
    """Warn if classes have too few samples for every worker to get one."""
    sizes = np.diff(classes.members()[1])
    small = sizes[sizes < n_workers]
    if len(small):
        warnings.warn(
            f"balance={classes.name!r}: {len(small)} of {len(sizes)} classes have fewer samples than there are workers "
            f"({n_workers}), so some workers do not get any of them in an epoch; the smallest has {small.min()} "
            "samples",
            ShardingWarning,
            stacklevel=stacklevel + 1,
        )


def with_data(shuffle: ShuffleSpec, dataset: Dataset) -> ShuffleSpec:
    """Read the labels and the first epoch's ranks that the plan only names."""
    labels = functools.cache(lambda name: read_labels(dataset, name))  # balance and sharding may use the same array
    choices = shuffle.choices
    balance, sharding = choices.balance, choices.sharding
    if balance is not None:
        shuffle = shuffle.with_choices(balance=balance.found(labels(balance.name), shuffle.n_samples))
    if isinstance(sharding, GivenSharding) and sharding.ranks is None:
        if sharding.name.startswith(STRATIFIED):
            values = labels(sharding.name.removeprefix(STRATIFIED))
            ranks = stratified_ranks(values, shuffle.n_workers, seed=choices.seed, n_samples=shuffle.n_samples)
            sharding = sharding.found(ranks)
        else:
            sharding = sharding.found(
                read_sharding(dataset, sharding.name), read_sharding(dataset, sharding.name, "broadcast")
            )
        shuffle = shuffle.with_choices(sharding=sharding)
    return shuffle


def for_workers(shuffle: ShuffleSpec, n_workers: int, dataset: Dataset) -> ShuffleSpec:
    """The same shuffle, with its data, for another number of workers."""
    sharding = shuffle.choices.sharding
    if isinstance(sharding, GivenSharding) and sharding.name.startswith(STRATIFIED):
        sharding = GivenSharding(sharding.name)  # its ranks depend on the number of workers
    choices = dataclasses.replace(shuffle.choices, sharding=sharding)
    return with_data(
        dataclasses.replace(shuffle, n_workers=n_workers, choices=choices, hosts=(), first_weights=()), dataset
    )


def read_labels(dataset: Dataset, name: str) -> NDArray[np.generic]:
    """Read a whole array of labels, of shape ``(q,)``."""
    return read_array(dataset, name)[: dataset.n_samples]
