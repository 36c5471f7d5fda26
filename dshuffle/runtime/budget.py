"""Whether a cache partition fits a worker, said before anything is allocated and with a way out."""

from __future__ import annotations

import dataclasses

from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.exchange.cache import CachePartition
from dshuffle.planning import ShufflePlanSpec
from dshuffle.rows import RowLayout


def check_budget(plan: ShufflePlanSpec, layout: RowLayout, limit: int | None) -> None:
    """Refuse a session whose cache partitions do not fit.

    Raises
    ------
    CacheBudgetError
        Saying how many bytes are needed, and how many workers would do.
    """
    needed = _needed(plan, layout)
    if limit is None or needed <= limit:
        return
    workers = _workers_that_fit(plan, layout, limit)
    if workers is None:
        way_out = "no number of workers would do"
        if plan.cache_fraction is not None:
            way_out += f" with cache_fraction={plan.cache_fraction}; lower it or raise memory_limit"
    else:
        way_out = f"{workers} workers would do, or a memory_limit of {needed} bytes"
    raise CacheBudgetError(
        f"a cache partition needs {needed} bytes on each of {plan.n_workers} workers ({plan.capacity} rows of "
        f"{layout.nbytes} bytes and room for {plan.max_incoming} incoming ones) and memory_limit allows {limit}; "
        f"{way_out}"
    )


def _needed(plan: ShufflePlanSpec, layout: RowLayout) -> int:
    return CachePartition.nbytes_for(layout, plan.capacity + plan.max_incoming)


def _workers_that_fit(plan: ShufflePlanSpec, layout: RowLayout, limit: int) -> int | None:
    """The fewest workers whose partitions fit, by bisection: more workers never need more each."""

    def fits(n_workers: int) -> bool:
        try:
            return _needed(dataclasses.replace(plan, n_workers=n_workers), layout) <= limit
        except InvalidParameter:  # a cache fraction below 1/n is not allowed: too few workers
            return False

    low, high = plan.n_workers, plan.n_samples
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
