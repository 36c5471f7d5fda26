"""Compile the numba kernels once, in one process, before all workers would compile them at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from dshuffle.exchange.warmup import ROW_NBYTES, warm_up
from dshuffle.planning import Aligned, Choices, Global, Partial, ShuffleSpec, get_delivery
from dshuffle.planning.delivery import Excess
from dshuffle.planning.mixing import planned_quality
from dshuffle.planning.small_plan import compile_planner
from dshuffle.store.reader import scatter_patches, scatter_rows
from dshuffle.training.linear_regression import sgd_pass, squared_residual


def compile_kernels(deliveries: Iterable[str] = ("peer",)) -> None:
    """Run the numba kernels of planning, exchanges, reading and SGD on small inputs.

    Processes that start later load the code from numba's cache on disk. On two cores and four workers, this makes the
    very first run about half a minute shorter. If all kernels are cached already, it takes a second.
    """
    for dtypes in itertools.product((np.float32, np.float64), repeat=2):
        rows, targets = (np.zeros((1, 1), dtype) for dtype in dtypes)
        rows.flags.writeable = targets.flags.writeable = False  # like the arrays of a partition
        slots = np.zeros(1, np.int64)
        sgd_pass(np.zeros(1), rows, 0, targets, 0, slots, 0.0)
        squared_residual(np.zeros(1), rows, 0, targets, 0, slots)
    coded = [get_delivery(name) for name in sorted(deliveries) if get_delivery(name).coded]
    for row_nbytes in ROW_NBYTES:
        warm_up(row_nbytes, coded=bool(coded))
    ways = [Choices(Global()), Choices(Partial(0.5))]
    for delivery in coded:
        fraction = None if delivery.excess is Excess.REFUSED else 0.5
        ways += [Choices(rule, delivery.name, None, fraction) for rule in (Global(), Aligned())]
    for choices in ways:
        compile_planner(ShuffleSpec(64, 4, choices))
    planned_quality(ShuffleSpec(64, 4, ways[0]), epochs=2, chunk_rows=8, batch_rows=8, classes=np.arange(64) % 2)
    for writeable in (True, False):  # like decoded and stored blocks
        block = np.zeros((1, 1), np.uint8)
        block.flags.writeable = writeable
        one = np.zeros(1, np.int64)
        scatter_rows(block, one, 0, np.zeros(1, np.uint8), one)
        scatter_patches(block, one, 0, np.zeros(1, np.uint8), one, one, one, 1)
