"""Compile the numba kernels once, in one process, before all workers would compile them at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from dshuffle.exchange.transports import transport_of
from dshuffle.exchange.warmup import ROW_NBYTES, warm_up
from dshuffle.planning import DELIVERIES, Aligned, Choices, Chunks, Global, Partial, ShuffleSpec, get_delivery
from dshuffle.planning.small_plan import compile_planner
from dshuffle.rows import RowLayout
from dshuffle.store.scatter import scatter_columns, scatter_patches
from dshuffle.training.linear_regression import sgd_pass, squared_residual

FEW_WORKERS = 4
"""Workers of the small plans that are made here."""


def all_choices() -> Iterable[Choices]:
    """Choices that need all kernels of planning and exchanges, except those of class balance."""
    yield from (Choices(Global()), Choices(Partial(0.5)), Choices(Global(), "peer", None, 0.5))
    for delivery in DELIVERIES.values():
        if delivery.coded:
            fraction = 0.5 if delivery.supports(FEW_WORKERS, excess=True) else None
            yield from (Choices(rule, delivery.name, None, fraction) for rule in (Global(), Aligned()))


def compile_kernels(choices: Iterable[Choices] | None = None, layout: RowLayout | None = None) -> None:
    """Run the numba kernels of planning, exchanges, reading and linear regression on small inputs.

    Processes that start later load the code from numba's cache on disk. If all kernels are cached already, this takes a
    second.

    Parameters
    ----------
    choices
        The ways of shuffling of the run. By default kernels of all choices are compiled, which takes about 20
        seconds of processor time.
    layout
        Layout of the rows. By default kernels for rows of all lengths and types are compiled.

    Examples
    --------
    >>> layout = RowLayout.of({"x": (np.dtype("f4"), (10,)), "y": (np.dtype("f4"), ())})
    >>> compile_kernels([Choices(Partial(0.1)), Choices(delivery="storage")], layout)
    """
    features = {np.dtype(np.float32), np.dtype(np.float64)}
    target_types = features
    if layout is not None:
        types = {layout.dtype[name].base for name in layout.names}
        features = features & types
        target_types = features | ({np.dtype(np.float64)} if types - features else set())  # integers are cast
    for pair in itertools.product(features, target_types):
        rows, targets = (np.zeros((1, 1), dtype) for dtype in pair)
        rows.flags.writeable = targets.flags.writeable = False  # like the arrays of a partition
        slots = np.zeros(1, np.int64)
        sgd_pass(np.zeros(1), rows, 0, targets, 0, slots, 0.0)
        squared_residual(np.zeros(1), rows, 0, targets, 0, slots)
    reduced_choices = dict.fromkeys(map(_few, all_choices() if choices is None else choices))
    for row_nbytes in ROW_NBYTES:
        warm_up(row_nbytes)
    for transport in {transport_of(reduced.delivery) for reduced in reduced_choices}:
        for row_nbytes in transport.coded_lengths(None if layout is None else layout.nbytes):
            warm_up(row_nbytes, coded=True)
    for reduced in reduced_choices:
        compile_planner(ShuffleSpec(64, FEW_WORKERS, reduced))
    for writeable in (True, False):  # like decoded and stored blocks
        block = np.zeros((1, 1), np.uint8)
        block.flags.writeable = writeable
        zero = np.zeros(1, np.int64)
        scatter_patches(block, zero, 0, np.zeros(1, np.uint8), zero, zero, zero, 1)
    for word in ("u1", "u2", "u4", "u8"):
        scatter_columns(np.zeros(1, word), zero, zero, zero, zero, 0, np.zeros(1, word), zero)


def _few(choices: Choices) -> Choices:
    """Choices for a few samples that need the same kernels."""
    delivery = get_delivery(choices.with_one_delivery().delivery)
    has_excess = choices.cache_fraction is not None and delivery.supports(FEW_WORKERS, excess=True)
    return Choices(
        Chunks(4) if isinstance(choices.assignment, Chunks) else choices.assignment,
        delivery.name,
        choices.caching,
        0.5 if has_excess else None,
    )
