"""The first assignment of a session, where it is more than a name and a seed: found by every member for itself."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SHARDINGS, GivenSharding, ShufflePlanSpec, stratified_assignment
from dshuffle.store import Dataset, read_array, read_sharding, stored_shardings

STRATIFIED = "stratified:"
"""With what the name begins of a sharding by labels; it ends with the name of their array."""


def wanted_sharding(dataset: Dataset, sharding: str | ArrayLike) -> str | GivenSharding:
    """What a user asked for, checked as far as the client can without reading labels.

    Ranks stored beside the dataset are read here once, for their shape and checksum, and travel by name.

    Raises
    ------
    InvalidParameter
        If there is no such sharding, or no such labels, or ranks are no balanced assignment.
    """
    if not isinstance(sharding, str):
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
        found = GivenSharding.of(sharding, read_sharding(dataset, sharding))
        return dataclasses.replace(found, ranks=None)
    hint = "Make one with 'dshuffle shard --write', or give 'stratified:LABELS' or an array of ranks."
    raise InvalidParameter.of("sharding", sharding, f"one of {[*sorted(SHARDINGS), *stored]}", hint)


def with_first_assignment(plan: ShufflePlanSpec, dataset: Dataset) -> ShufflePlanSpec:
    """The plan, with the ranks of its first epoch where it had their name only.

    Raises
    ------
    InvalidParameter
        If labels are no classes, or stored ranks are not those any more that the client saw.
    """
    given = plan.sharding
    if isinstance(given, str) or given.ranks is not None:
        return plan
    if given.name.startswith(STRATIFIED):
        labels = read_labels(dataset, given.name.removeprefix(STRATIFIED))
        ranks = stratified_assignment(labels, plan.n_workers, seed=plan.seed, n_samples=plan.n_samples)
    else:
        ranks = read_sharding(dataset, given.name)
    return dataclasses.replace(plan, sharding=given.found(ranks))


def read_labels(dataset: Dataset, name: str) -> NDArray[np.generic]:
    """``(q,)``: one of a dataset's arrays, whole."""
    return read_array(dataset, name)[: dataset.n_samples]


def _check_labels(dataset: Dataset, sharding: str) -> None:
    name = sharding.removeprefix(STRATIFIED)
    info = dataset.arrays.get(name)
    if info is None or info.shape or info.dtype.kind not in "iub":
        fit = [key for key, one in dataset.arrays.items() if not one.shape and one.dtype.kind in "iub"]
        hint = "Labels are an array of one integer a sample."
        raise InvalidParameter.of("sharding", sharding, f"'stratified:' and one of {fit}", hint)
