"""Compile once, in one process, what every worker would otherwise compile at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from dshuffle.exchange.warmup import warm_up
from dshuffle.planning import UNCODED, Aligned, Assignment, EpochPlanner, Global, Partial, ShufflePlanSpec
from dshuffle.training.linear_regression import sgd_pass, squared_residual


def compile_kernels(deliveries: Iterable[str] = ("peer",)) -> None:
    """Run the numba kernels of planning, of exchanges and of SGD on a few numbers.

    Processes started later load the code from numba's cache on disk: on two cores and four workers that makes
    the very first run about half a minute shorter. Where all is in the cache already it takes a second.
    """
    for dtypes in itertools.product((np.float32, np.float64), repeat=2):
        rows, targets = (np.zeros((1, 1), dtype) for dtype in dtypes)
        rows.flags.writeable = targets.flags.writeable = False  # as a partition's are
        slots = np.zeros(1, np.int64)
        sgd_pass(np.zeros(1), rows, 0, targets, 0, slots, 0.0)
        squared_residual(np.zeros(1), rows, 0, targets, 0, slots)
    coded = set(deliveries) - UNCODED
    for row_nbytes in (8, 12):
        warm_up(row_nbytes, coded=bool(coded))
    ways: list[tuple[Assignment, str, float | None]] = [(Global(), "peer", None), (Partial(0.5), "peer", None)]
    for name in sorted(coded):
        fraction = None if name == "leftover" else 0.5
        ways += [(Global(), name, fraction), (Aligned(), name, fraction)]
    for assignment, delivery, cache_fraction in ways:
        planner = EpochPlanner(
            ShufflePlanSpec(
                64,
                4,
                seed=0,
                assignment=assignment,
                delivery=delivery,
                sharding="random",
                caching="even" if assignment == Aligned() else "uniform",
                cache_fraction=cache_fraction,
            )
        )
        planner.load()
        planner.advance().shares  # noqa: B018  it has a kernel too
