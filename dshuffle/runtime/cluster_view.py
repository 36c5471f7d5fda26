"""Check the Dask client, query the cluster, and choose a session's ranks and server."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import dask
from distributed import Client, LocalCluster, Nanny, Scheduler
from distributed.core import Status
from distributed.scheduler import WorkerState

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning import SERVER, ShuffleSpec, get_delivery
from dshuffle.runtime.kept_choice import Found, choose_kept
from dshuffle.runtime.session_spec import Former, SessionRequest, SessionSpec


def check_client(client: Any) -> None:
    """Raise unless the client is synchronous and connected."""
    if not isinstance(client, Client):
        raise InvalidParameter.of("client", client, "a dask.distributed Client")
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a separate thread.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")


def cluster_info(client: Client) -> dict[str, Any]:
    """Ask the scheduler for its information, with all workers by address under ``"workers"``.

    ``Client.scheduler_info`` is not reliable for this: it returns an attribute that the client refreshes every few
    seconds without the workers, so sometimes there seem to be none.

    Raises
    ------
    ClusterError
        If the scheduler cannot be reached.
    """
    assert client.scheduler is not None
    try:
        return dict(client.sync(client.scheduler.identity, n_workers=-1))
    except OSError as error:
        raise ClusterError(f"the scheduler cannot be reached: {error}. Make a new Client and a new Shuffler") from error


def running_workers(information: Mapping[str, Any]) -> int:
    """Number of workers that :func:`cluster_info` has, without those that leave or are paused.

    ``Client.wait_for_workers`` counts the same ones.
    """
    return sum(worker["status"] == Status.running.name for worker in information["workers"].values())


SERVER_RESOURCE = "dshuffle-server"
"""Dask resource of a worker that serves and does not train."""


def only_serves(resources: Mapping[str, float] | None) -> bool:
    """Whether a worker with these Dask resources serves and does not train."""
    return SERVER_RESOURCE in (resources or {})


def is_adaptive(client: Client) -> bool:
    """Whether the cluster of a client scales itself, and so starts new workers in place of lost ones."""
    return getattr(client.cluster, "_adaptive", None) is not None


LOST_WORKER = "distributed.deploy.lost-worker-timeout"
"""Setting of Dask: time after which a cluster ends the job or the nanny of a worker that is away."""

DEFAULT_LOST = "15s"
"""Its default."""

RESTARTED_WITHIN = "1d"
"""Its value for local clusters. Their nannies start lost workers again, however long that takes."""


def keep_nannies(client: Client) -> None:
    """Keep a local cluster from ending the nannies that start lost workers again.

    A worker that imports PyTorch on a busy machine needs more than the default of 15 s to come back. Dask reads the
    setting in this process, when a worker is lost. A value of the user stays, and so does the default for an adaptive
    cluster, which starts another worker after this time.
    """
    cluster = client.cluster
    if not isinstance(cluster, LocalCluster) or is_adaptive(client):
        return
    nannies = all(isinstance(worker, Nanny) for worker in cluster.workers.values())
    if nannies and dask.config.get(LOST_WORKER, DEFAULT_LOST) == DEFAULT_LOST:
        dask.config.set({LOST_WORKER: RESTARTED_WITHIN})


def starts_no_more(client: Client) -> str | None:
    """Say that an adaptive cluster will start no more workers although it may have more, if that is so.

    Dask starts workers only when tasks wait. A session never has waiting tasks, because it has one for each worker.
    """
    adaptive = getattr(client.cluster, "_adaptive", None)
    if adaptive is None or adaptive.minimum >= adaptive.maximum:
        return None
    n_workers = count_training_workers(client)
    if n_workers > max(adaptive.minimum, 1):
        return None
    return (
        f"the session trains on {n_workers} worker{'s' * (n_workers > 1)}, and the adaptive cluster starts no more for "
        "it, because a session has one task for each worker. For more workers, raise the minimum: "
        "cluster.adapt(minimum=...)"
    )


def count_training_workers(client: Client) -> int:
    """Number of workers of a cluster that would train: all but those that only serve."""
    return sum(not only_serves(worker.get("resources")) for worker in cluster_info(client)["workers"].values())


@dataclass(frozen=True, slots=True)
class Members:
    """The participants of a session, and the role of its server.

    ``server_role`` is ``"dedicated"``, ``"beside rank R"``, or empty if the session does not have a server.
    """

    spec: SessionSpec
    server_role: str


def choose_members(
    scheduler: Scheduler,
    order: SessionRequest,
    ready: Collection[str],
    former: Former | None = None,
    kept: Found = MappingProxyType({}),
) -> Members:
    """Assign ranks in the order of worker names, so that the same cluster always gets the same ranks.

    The workers of a host have consecutive ranks.

    Only the workers whose addresses are in ``ready`` take part. Their first partitions are read from ``former`` ones.
    Otherwise they are read from partitions that were ``kept`` on the workers' disks, if there are any. Workers then get
    the ranks whose partitions they have.

    Raises
    ------
    ClusterError
        If no worker is left to train.
    InvalidParameter
        If ``server`` is not the address or name of a worker, or there are more workers than samples.
    """
    workers = in_rank_order(worker for where, worker in scheduler.workers.items() if where in ready)
    server = _find_server(workers, order.options.server)
    training = [worker for worker in workers if worker is not server and not only_serves(worker.resources)]
    if not training and server is not None and order.options.server is not None:
        training = [server]  # the user named the only worker as the server, so it also trains
    if not training:
        raise ClusterError(
            f"none of the {len(workers)} workers can train: all have the resource {SERVER_RESOURCE!r}. Add a worker "
            "without it"
        )
    most = max(map(get_delivery, order.deliveries), key=lambda delivery: delivery.demands)
    choices = dataclasses.replace(order.choices, delivery=most.name)
    plan = ShuffleSpec(order.dataset.n_samples, len(training), choices, first_epoch=order.start.epoch)
    ranks, carried = [worker.address for worker in training], order.carried
    history = None if carried is None else carried.history
    if former is None and (choice := choose_kept(kept, order.kept_as, plan, ranks, history)):
        former, ranks = choice
        training = [scheduler.workers[address] for address in ranks]
        if carried is not None:
            carried = carried.placed(former, ranks)
    if carried is not None:
        plan = carried.onto(plan, ranks)
    plan = dataclasses.replace(plan, hosts=_shared_hosts(training))
    addresses = {rank: worker.address for rank, worker in enumerate(training)}
    role = ""
    if any(get_delivery(name).needs_server for name in order.deliveries):
        serving = server if server is not None else training[0]
        addresses[SERVER] = serving.address
        role = "dedicated" if serving not in training else f"beside rank {training.index(serving)}"
    spec = SessionSpec(
        order.session_id,
        order.dataset,
        plan,
        tuple(order.deliveries),
        order.options,
        order.settings,
        order.start,
        addresses,
        kept_as=order.kept_as,
        former=former,
    )
    return Members(spec, role)


def _find_server(workers: list[WorkerState], wanted: str | None) -> WorkerState | None:
    if wanted is None:
        marked = [worker for worker in workers if only_serves(worker.resources)]
        return marked[0] if marked else None
    for worker in workers:
        if wanted in (worker.address, str(worker.name)):
            return worker
    names = ", ".join(f"{worker.name} ({worker.address})" for worker in workers)
    raise InvalidParameter.of("server", wanted, f"the name or address of one of these workers: {names}")


def in_rank_order(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Workers in the order of their names, but all workers of a host after its first one."""
    ordered = sorted(workers, key=by_name)
    hosts = {worker.host: place for place, worker in reversed(list(enumerate(ordered)))}
    return sorted(ordered, key=lambda worker: hosts[worker.host])  # keeps the order of a host's workers


def _shared_hosts(training: Sequence[WorkerState]) -> tuple[int, ...]:
    """Number of each worker's host; empty if all are on one host, or each on its own."""
    names = [worker.host for worker in training]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if 1 < len(numbers) < len(names) else ()


def by_name(worker: WorkerState) -> tuple[bool, int, str, str]:
    """Sort key: numeric names by value, then other names; the address breaks ties."""
    name = str(worker.name)
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name, worker.address
