"""Whether a cache partition fits a worker, said before anything is allocated and with a way out."""

from __future__ import annotations

import dataclasses

from dask.utils import parse_bytes

from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning import UNCODED, ShufflePlanSpec
from dshuffle.planning.delivery import MOST_FOR_TABLES
from dshuffle.rows import RowLayout


def parse_memory_limit(memory_limit: int | str | None) -> int | None:
    """Bytes, if a user gives a limit.

    Raises
    ------
    InvalidParameter
        If that is no number of bytes.

    Examples
    --------
    >>> parse_memory_limit("2 KiB"), parse_memory_limit(None)
    (2048, None)
    """
    if memory_limit is None:
        return None
    try:
        parsed = int(parse_bytes(memory_limit))
    except (ValueError, TypeError):
        parsed = 0
    if parsed < 1:
        raise InvalidParameter.of("memory_limit", memory_limit, 'a number of bytes, such as "2 GiB" or 2**31')
    return parsed


def check_budget(plan: ShufflePlanSpec, layout: RowLayout, limit: int | None) -> None:
    """Refuse a session whose cache partitions do not fit.

    Raises
    ------
    CacheBudgetError
        Saying how many bytes are needed, and how many workers would do.
    """
    needed = partition_nbytes(plan, layout)
    if limit is None or needed <= limit:
        return
    workers = _workers_that_fit(plan, layout, limit)
    if workers is None:
        way_out = "no number of workers would do"
        if plan.cache_fraction is not None:
            way_out += f" with cache_fraction={plan.cache_fraction}; lower it or raise memory_limit"
    else:
        way_out = f"{workers} workers would do, or a memory_limit of {needed} bytes"
    relayed = f", and for {_relayed(plan)} packets to hand on" if _relayed(plan) else ""
    raise CacheBudgetError(
        f"a cache partition needs {needed} bytes on each of {plan.n_workers} workers ({plan.capacity} rows of "
        f"{layout.nbytes} bytes and room for {plan.max_incoming} incoming ones{relayed}) and memory_limit allows "
        f"{limit}; {way_out}"
    )


def partition_nbytes(plan: ShufflePlanSpec, layout: RowLayout) -> int:
    """Bytes that a worker may come to need for its rows, incoming ones, and packets that it hands on."""
    return CachePartition.nbytes_for(layout, plan.capacity + plan.max_incoming + _relayed(plan))


def _relayed(plan: ShufflePlanSpec) -> int:
    """Packets that a worker may have to hand on: none that it does not get a sample out of."""
    return 0 if plan.delivery in UNCODED or plan.relay == "unicast" else plan.max_incoming


def _workers_that_fit(plan: ShufflePlanSpec, layout: RowLayout, limit: int) -> int | None:
    """The fewest workers whose partitions fit, by bisection: more workers never need more each."""

    def fits(n_workers: int) -> bool:
        try:
            return partition_nbytes(dataclasses.replace(plan, n_workers=n_workers), layout) <= limit
        except InvalidParameter:  # a cache fraction below 1/n is not allowed: too few workers
            return False

    low, high = plan.n_workers, plan.most_workers
    if not fits(high):
        high = min(high, MOST_FOR_TABLES)  # some deliveries serve no more
    if high <= low or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
