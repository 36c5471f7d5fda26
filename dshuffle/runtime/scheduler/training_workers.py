"""Which workers could train, and how they differ from the members of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distributed import Scheduler, Status

from dshuffle.planning import SERVER
from dshuffle.runtime.messages import MemberChanges
from dshuffle.runtime.server_resource import only_serves
from dshuffle.runtime.worker_choice import WorkerChoice

LEAVING = (Status.closing, Status.closing_gracefully, Status.closed)
"""States of workers that Dask retires or closes."""


def member_changes(
    scheduler: Scheduler, choice: WorkerChoice, addresses: Mapping[int, str], adopted: Iterable[int]
) -> MemberChanges:
    """Compare the workers that could train with the members of a session.

    Parameters
    ----------
    choice
        The workers that the session may have.
    addresses
        Address of every rank, and of the server.
    adopted
        Ranks whose workers have another rank as well.
    """
    workers = scheduler.workers
    training = {
        address
        for address, worker in workers.items()
        if worker.status == Status.running and not only_serves(worker.resources) and choice.allows(worker)
    }
    ranks = {address for participant, address in addresses.items() if participant != SERVER}
    left = {address for address in ranks if address not in workers or workers[address].status in LEAVING}
    return MemberChanges(
        joined=tuple(sorted(training - set(addresses.values()))),
        leaving=tuple(sorted(left)),
        n_available=len(training),
        adopted=tuple(sorted(adopted)),
    )
