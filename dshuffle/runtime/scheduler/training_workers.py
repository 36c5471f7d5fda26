"""Which workers could train, and how they differ from the members of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Scheduler, Status

from dshuffle.planning import SERVER
from dshuffle.runtime.cluster_view import only_serves

LEAVING = (Status.closing, Status.closing_gracefully, Status.closed)
"""States of workers that Dask retires or closes."""


def changes(scheduler: Scheduler, addresses: Mapping[int, str]) -> dict[str, Any]:
    """Compare the workers that could train with the members of a session.

    Parameters
    ----------
    addresses
        Address of every rank, and of the server.

    Returns
    -------
    dict
        Under ``"joined"``, workers that are not members. Under ``"leaving"``, members that have left or are about to
        leave. Under ``"there"``, the number of workers that could train.
    """
    workers = scheduler.workers
    training = {
        address
        for address, worker in workers.items()
        if worker.status == Status.running and not only_serves(worker.resources)
    }
    ranks = {address for who, address in addresses.items() if who != SERVER}
    left = {address for address in ranks if address not in workers or workers[address].status in LEAVING}
    return {
        "joined": sorted(training - set(addresses.values())),
        "leaving": sorted(left),
        "there": len(training),
    }
