"""Who could train, and whose partitions can be read: for sessions whose workers change between epochs."""

from __future__ import annotations

from collections.abc import Mapping

from distributed import Scheduler, Status

from dshuffle.planning import SERVER
from dshuffle.runtime.cluster_view import only_serves

LEAVING = (Status.closing, Status.closing_gracefully, Status.closed)
"""States of workers that Dask retires or closes."""


def joined(scheduler: Scheduler, addresses: Mapping[int, str]) -> list[str]:
    """Workers that could train and are not members of a session with these addresses."""
    members = set(addresses.values())
    return sorted(
        address
        for address, worker in scheduler.workers.items()
        if worker.status == Status.running and not only_serves(worker.resources) and address not in members
    )


def n_training(scheduler: Scheduler) -> int:
    """Number of workers that could train."""
    workers = scheduler.workers.values()
    return sum(worker.status == Status.running and not only_serves(worker.resources) for worker in workers)


def leaving(scheduler: Scheduler, addresses: Mapping[int, str]) -> list[str]:
    """Members that train and have left, or are about to leave."""
    there = scheduler.workers
    ranks = {address for who, address in addresses.items() if who != SERVER}
    return sorted(address for address in ranks if address not in there or there[address].status in LEAVING)
