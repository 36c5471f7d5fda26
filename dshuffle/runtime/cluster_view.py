"""Which Dask clients dshuffle can work with, and what they know of their cluster.

Which workers take part in a session, which rank each gets, and which one serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed import Client, Scheduler
from distributed.scheduler import WorkerState

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning import DELIVERIES, SERVER, UNCODED, ShufflePlanSpec
from dshuffle.runtime.session_spec import SessionSpec, ShuffleOrder


def check_client(client: Any) -> None:
    """Raise unless the client is a synchronous one that is connected."""
    if not isinstance(client, Client):
        raise InvalidParameter.of("client", client, "a dask.distributed Client")
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a thread of its own.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")


def cluster_info(client: Client) -> dict[str, Any]:
    """What the scheduler says of itself and, under ``"workers"``, of all its workers by address.

    ``Client.scheduler_info`` answers from an attribute that the client itself refreshes every few seconds, without any
    workers, so that now and then there seem to be none.
    """
    assert client.scheduler is not None
    return dict(client.sync(client.scheduler.identity, n_workers=-1))


SERVER_RESOURCE = "dshuffle-server"
"""A worker with this Dask resource serves and does not train."""

NEEDS_SERVER = DELIVERIES.keys() - {"storage", "peer"}
"""Deliveries that one worker sends."""


@dataclass(frozen=True, slots=True)
class Members:
    """A session's ranks and its server."""

    spec: SessionSpec
    server_role: str


def choose_members(scheduler: Scheduler, order: ShuffleOrder) -> Members:
    """Give out ranks by worker name, so that the same cluster gets the same ranks again.

    Raises
    ------
    ClusterError
        If no worker is left to train.
    InvalidParameter
        If ``server`` names no worker, or there are more workers than samples.
    """
    workers = sorted(scheduler.workers.values(), key=_by_name)
    server = _find_server(workers, order.server)
    training = [
        worker for worker in workers if worker is not server and SERVER_RESOURCE not in (worker.resources or {})
    ]
    if not training and server is not None and order.server is not None:
        training = [server]  # the only worker was named as the server: it does both
    if not training:
        raise ClusterError(
            f"none of the {len(workers)} workers is left to train: all have the resource {SERVER_RESOURCE!r}"
        )
    plan = ShufflePlanSpec(
        n_samples=order.dataset.n_samples,
        n_workers=len(training),
        seed=order.seed,
        assignment=order.assignment,
        delivery=max(order.deliveries, key=_demands),
        sharding=order.sharding,
        caching=order.caching,
        cache_fraction=order.cache_fraction,
        relay=order.relay,
        balance=order.balance,
    )
    addresses = {rank: worker.address for rank, worker in enumerate(training)}
    role = ""
    if order.deliveries.keys() & NEEDS_SERVER:
        serving = server if server is not None else training[0]
        addresses[SERVER] = serving.address
        role = "dedicated" if serving not in training else f"beside rank {training.index(serving)}"
    spec = SessionSpec(
        order.session_id, order.dataset, plan, tuple(order.deliveries), order.memory_limit, order.settings, addresses
    )
    return Members(spec, role)


def _find_server(workers: list[WorkerState], wanted: str | None) -> WorkerState | None:
    if wanted is None:
        marked = [worker for worker in workers if SERVER_RESOURCE in (worker.resources or {})]
        return marked[0] if marked else None
    for worker in workers:
        if wanted in (worker.address, str(worker.name)):
            return worker
    names = ", ".join(f"{worker.name} ({worker.address})" for worker in workers)
    raise InvalidParameter.of("server", wanted, f"the address or name of a worker: {names}")


def _demands(delivery: str) -> tuple[bool, bool]:
    return delivery not in UNCODED, delivery in NEEDS_SERVER


def _by_name(worker: WorkerState) -> tuple[bool, int, str, str]:
    """Numbers by value, before all other names; addresses settle ties."""
    name = str(worker.name)
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name, worker.address
