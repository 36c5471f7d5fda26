"""Compile once, in one process, what every worker would otherwise compile at the same time."""

from __future__ import annotations

import numpy as np

from dshuffle.planning import EpochPlanner, Global, Partial, ShufflePlanSpec
from dshuffle.rows import checksum_rows
from dshuffle.training.linear_regression import sgd_pass


def compile_kernels() -> None:
    """Run the numba kernels of planning, checksums and SGD on a few numbers.

    Processes started later load the code from numba's cache on disk: on two cores and four workers that makes
    the very first run about half a minute shorter. Where all is in the cache already it takes a second.
    """
    for dtype in (np.float32, np.float64):
        sgd_pass(np.zeros(1), np.zeros((1, 1), dtype=dtype), np.zeros(1), 0.0)
    checksum_rows(np.zeros((1, 8), dtype=np.uint8), np.zeros(1, dtype=np.int64))
    for assignment in (Global(), Partial(0.5)):
        planner = EpochPlanner(
            ShufflePlanSpec(64, 4, seed=0, assignment=assignment, delivery="peer", sharding="random")
        )
        planner.load()
        planner.advance()
