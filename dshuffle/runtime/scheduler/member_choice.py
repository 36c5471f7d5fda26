"""Choose the ranks and the server of a session among the workers of the cluster."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from distributed import Scheduler
from distributed.scheduler import WorkerState

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning import SERVER, ShuffleSpec, get_delivery
from dshuffle.planning.share_sizes import Weights, as_weights
from dshuffle.planning.shares import ShareBounds, bounded_weights
from dshuffle.runtime.scheduler.kept_choice import KeptPartitions, choose_kept
from dshuffle.runtime.server_resource import SERVER_RESOURCE, only_serves
from dshuffle.runtime.session_spec import EarlierWorkers, PartitionSources, SessionRequest, SessionSpec
from dshuffle.runtime.worker_choice import identities, in_words

logger = logging.getLogger(__name__)


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
    former: PartitionSources | None = None,
    kept: KeptPartitions = MappingProxyType({}),
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
        If ``server``, or a name in ``shares``, is not the address or name of a worker, or there are more workers than
        samples.
    """
    workers = in_rank_order(worker for where, worker in scheduler.workers.items() if where in ready)
    server = _find_server(workers, order.options.server)
    training = [worker for worker in workers if worker is not server and not only_serves(worker.resources)]
    if order.weights is not None:
        by_address = {worker.address: worker for worker in training}
        if not order.weights.keys() <= by_address.keys():
            raise ClusterError("a worker has left the cluster or is paused, so that shares cannot change now")
        training = [by_address[address] for address in order.weights]  # every worker keeps its rank
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
    weights = _weights(order, training, carried, plan)
    if carried is not None:
        plan = carried.onto(plan, ranks, weights)
    else:
        plan = dataclasses.replace(plan, first_weights=weights)
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
        choice=order.choice,
    )
    return Members(spec, role)


def _weights(
    order: SessionRequest, training: Sequence[WorkerState], carried: EarlierWorkers | None, plan: ShuffleSpec
) -> Weights:
    addresses = [worker.address for worker in training]
    if order.weights is not None:
        return as_weights([order.weights[address] for address in addresses])
    before = () if carried is None else carried.weights_of(addresses)
    shares, names = order.choices.shares, [identities(worker) for worker in training]
    absent = [name for name in shares.names if not any(name in own for own in names)]
    if carried is None and not order.options.elastic and absent:
        allowed = f"the names or addresses of workers that train: {in_words(training)}"
        raise InvalidParameter.of("shares", ", ".join(absent), allowed)
    for worker, own in zip(training, names, strict=True):
        if len(twice := [name for name in shares.names if name in own]) > 1:
            raise InvalidParameter.of("shares", ", ".join(twice), f"one number for the worker {worker.name}")
    weights = shares.first(len(addresses), before, names)
    if carried is not None and shares.names:
        try:
            dataclasses.replace(plan, first_weights=weights)
        except InvalidParameter as error:  # the numbers suited the workers that there were before
            logger.warning("dshuffle: the shares are nearer to equal ones: %s", error)
            choices = plan.choices
            bounds = ShareBounds.of(choices.assignment, choices.cache_fraction, plan.n_samples, plan.n_workers)
            return bounded_weights(np.array(weights, float), bounds)
    return weights


def _find_server(workers: list[WorkerState], server: str | None) -> WorkerState | None:
    if server is None:
        marked = [worker for worker in workers if only_serves(worker.resources)]
        return marked[0] if marked else None
    for worker in workers:
        if server in (worker.address, str(worker.name)):
            return worker
    raise InvalidParameter.of("server", server, f"the name or address of one of these workers: {in_words(workers)}")


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
