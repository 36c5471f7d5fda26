"""Plan a few samples, so that the kernels of a plan are compiled before anything is timed or waits for it."""

from __future__ import annotations

import dataclasses

import numpy as np

from dshuffle.planning.bijection import Bijection
from dshuffle.planning.own_part import OwnPlanner, plans_own_parts
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.remainder import SampleDigest
from dshuffle.planning.shuffle_spec import ShuffleSpec


def compile_planner(spec: ShuffleSpec) -> None:
    """Plan two epochs of a few samples with the assignment, delivery and caching of ``spec``.

    A random first assignment replaces another one, and balance is left out, because both belong to all samples.
    """
    choices = dataclasses.replace(spec.choices, sharding="random", balance=None)
    each = choices.assignment.unit or 1
    small = ShuffleSpec(min(spec.n_samples, spec.n_workers * max(16, each)), spec.n_workers, choices)
    if plans_own_parts(small, choices.delivery):
        OwnPlanner(small, 0).plan(1, choices.delivery)
    else:
        planner = EpochPlanner(small)
        planner.load()
        planner.advance().shares  # noqa: B018  computing the shares compiles another kernel
    network = Bijection.of(100, "warm-up", largest_table=0)  # few samples are drawn with tables
    network.inverse(network.forward(np.arange(9)))
    SampleDigest.of(np.arange(9), choices.seed)
