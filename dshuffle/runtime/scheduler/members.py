"""The workers that a session may have: whether they are set up, which ranks they get, and who may take lost ones."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from distributed import Scheduler, Status
from distributed.comm.addressing import get_address_host_port
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize
from distributed.scheduler import WorkerState

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.exchange.kept_partition import KeptFolder
from dshuffle.planning import SERVER, ShuffleSpec, WorkerHistory, get_delivery
from dshuffle.planning.exchange_epochs import Weights, as_weights
from dshuffle.planning.shares import ShareBounds, bounded_weights
from dshuffle.process_state import worker_process_runs
from dshuffle.runtime.messages import MemberChanges, within
from dshuffle.runtime.session_spec import (
    PROTOCOL,
    SERVER_RESOURCE,
    EarlierWorkers,
    PartitionSources,
    SessionRequest,
    SessionSpec,
    WorkerChoice,
    identities,
    in_words,
    only_serves,
)
from dshuffle.runtime.settings import Settings

logger = logging.getLogger(__name__)

ANSWER_WITHIN = 3.0
"""Seconds in which a nanny must answer."""

LEAVING = (Status.closing, Status.closing_gracefully, Status.closed)
"""States of workers that Dask retires or closes."""


async def process_runs(scheduler: Scheduler, worker: WorkerState, silent_seconds: float, settings: Settings) -> bool:
    """Whether a silent worker may be busy: its nanny says so, or it has a task and no nanny."""
    if not worker.nanny:
        return bool(worker.processing) and silent_seconds < settings.stopped_timeout
    try:
        reply = await within(ANSWER_WITHIN, scheduler.rpc(worker.nanny).run(function=dumps(worker_process_runs)))
    except Exception as error:  # it may have another release of dshuffle, or none, and Dask raises what it raised
        logger.debug("dshuffle: the nanny of %s cannot say whether it runs: %r", worker.address, error)
        return False
    result = reply.get("result") if isinstance(reply, dict) else None
    return (deserialize(result.header, result.frames) if isinstance(result, Serialized) else result) is True


def member_changes(scheduler: Scheduler, choice: WorkerChoice, addresses: Mapping[int, str]) -> MemberChanges:
    """Compare the workers that could train with the members of a session."""
    workers = scheduler.workers
    training = {
        address
        for address, worker in workers.items()
        if worker.status == Status.running and not only_serves(worker.resources) and choice.allows(worker)
    }
    ranks = {address for participant, address in addresses.items() if participant != SERVER}
    left = {address for address in ranks if address not in workers or workers[address].status in LEAVING}
    joined = tuple(sorted(training.difference(addresses.values())))
    return MemberChanges(joined=joined, leaving=tuple(sorted(left)), n_available=len(training))


SETUP_TIMEOUT = 60.0
"""Seconds in which all workers must be set up."""

ASK_AGAIN = 0.2
"""Seconds after which workers are asked again."""


async def workers_set_up(
    scheduler: Scheduler, settings: Settings, choice: WorkerChoice, fewest: int | None = None
) -> set[str]:
    """Wait until every worker that a session may have has set up the worker plugin, and return those that run tasks.

    With ``fewest``, workers whose processes do not run are left out if so many others are there.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(settings.timeout, SETUP_TIMEOUT)
    while True:
        workers = scheduler.workers
        present = [each.address for each in workers.values() if each.status not in LEAVING and choice.allows(each)]
        if not present:
            raise ClusterError(
                f"the cluster does not have any workers that the session may have ({in_words(workers.values()) or 0} "
                "are there); start some and wait for them with client.wait_for_workers"
            )
        replies = await ask_all(scheduler, present, settings.heartbeat)
        late = {address: why for address, reply in replies.items() if (why := why_unfit(reply))}
        for address, why in late.items():
            if isinstance(replies[address], dict) and replies[address].get("protocol") != PROTOCOL:
                raise ClusterError(f"worker {address} {why}. Install the same version on both", transient=False)
        are_silent = all(isinstance(replies[address], OSError) for address in late)
        if late and fewest is not None and len(replies) - len(late) >= fewest and are_silent:
            left = [workers[address] for address in late if address in workers]
            looks = (process_runs(scheduler, worker, settings.heartbeat, settings) for worker in left)
            if not any(await asyncio.gather(*looks)):
                logger.warning("dshuffle: left out, because they do not answer: %s", ", ".join(sorted(late)))
                break
        if not late:
            break
        if loop.time() > deadline:
            address, why = min(late.items())
            raise ClusterError(
                f"dshuffle could not be set up on {len(late)} of {len(replies)} workers, among them {address}, which "
                f"{why}. Make sure that it runs, and that the same version of dshuffle is installed there"
            )
        await asyncio.sleep(ASK_AGAIN)
    ready = [scheduler.workers[address] for address in replies.keys() - late.keys() if address in scheduler.workers]
    running = {worker.address for worker in ready if worker.status == Status.running}
    if not running:
        raise ClusterError(
            f"none of the workers can run tasks: {in_words(ready)}. Dask pauses a worker that uses more than 80 % of "
            "its memory limit. Free memory on these workers, or start workers with a larger limit"
        )
    return running


async def ask_all(
    scheduler: Scheduler, addresses: Iterable[str], heartbeat: float, operation: str = "protocol", **message: Any
) -> dict[str, Any]:
    """Ask workers by default for their protocol, and return the replies; one that does not answer has an error."""
    message["op"] = f"dshuffle_{operation}"

    async def ask(address: str) -> Any:
        reply: Any = scheduler.broadcast(msg=message, workers=[address], on_error="return")
        try:
            return (await within(heartbeat, reply))[address]
        except TimeoutError as error:
            return error

    addresses = list(addresses)
    return dict(zip(addresses, await asyncio.gather(*map(ask, addresses)), strict=True))


def why_unfit(reply: Any) -> str:
    """Why a worker with this answer cannot be a member; empty if it can."""
    if isinstance(reply, OSError):
        return f"does not answer ({type(reply).__name__}: {reply})"
    if not isinstance(reply, dict):
        return "is not set up for dshuffle: its log has the reason"
    if reply.get("protocol") != PROTOCOL:
        return f"has another version of dshuffle (protocol {reply.get('protocol')}, and not {PROTOCOL})"
    return "" if reply.get("is_set_up") else "still loads or compiles kernels (see dshuffle warmup)"


KeptPartitions = Mapping[str, Sequence[KeptFolder]]
"""Address of a worker -> the partitions in its directory. Workers on one machine may list the same ones."""


def choose_kept(
    kept: KeptPartitions,
    shuffle: str | None,
    plan: ShuffleSpec,
    workers: Sequence[str],
    history: WorkerHistory | None = None,
) -> tuple[PartitionSources, list[str]] | None:
    """Choose kept partitions, and the worker of each rank.

    All chosen partitions belong to the same epoch and the same history of workers. The group with the largest part of
    the samples is chosen. Among equals, one with this history comes first, then one with the present number of
    workers, then the latest epoch.
    """
    groups: dict[tuple[WorkerHistory, int], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for address in workers:
        for partition in kept.get(address, ()):
            label = partition.label
            if label.shuffle == shuffle and label.rank < label.history.n_workers:
                groups[label.history, label.epoch][label.rank][address] = partition.name
    if not groups:
        return None
    (former, epoch), partitions = max(
        groups.items(),
        key=lambda group: (
            len(group[1]) / group[0][0].n_workers,
            group[0][0] == history,
            group[0][0].n_workers == len(workers),
            group[0][1],
        ),
    )
    try:
        earlier = plan.with_history(former, epoch)
    except InvalidParameter:  # the sharding was given for the present number of workers
        return None
    ranks = _placed(partitions, workers)
    holders, asked = {}, Counter[str]()
    for rank, where in partitions.items():
        is_holder = rank < len(ranks) and ranks[rank] in where
        address = ranks[rank] if is_holder else min(where, key=lambda holder: (asked[holder], holder))
        asked[address] += 1
        holders[rank] = address, where[address]
    return PartitionSources(epoch, holders, earlier, kept=True), ranks


def _placed(partitions: Mapping[int, Collection[str]], workers: Sequence[str]) -> list[str]:
    """The workers by rank. Those that have partitions get their ranks, and the others get what is left, in order."""
    ranks: dict[int, str] = {}
    placed: set[str] = set()
    usable = [rank for rank in partitions if rank < len(workers)]
    for rank in sorted(usable, key=lambda rank: (len(partitions[rank]), rank)):
        if free := next((address for address in partitions[rank] if address not in placed), None):
            ranks[rank] = free
            placed.add(free)
    unplaced = (address for address in workers if address not in placed)
    return [ranks[rank] if rank in ranks else next(unplaced) for rank in range(len(workers))]


def server_role(addresses: Mapping[int, str]) -> str:
    """Role of the server: ``"dedicated"``, ``"beside rank R"``, or empty if the session does not have one."""
    if SERVER not in addresses:
        return ""
    ranks = (rank for rank, address in addresses.items() if rank != SERVER and address == addresses[SERVER])
    return next((f"beside rank {rank}" for rank in ranks), "dedicated")


def choose_members(
    scheduler: Scheduler,
    order: SessionRequest,
    ready: Collection[str],
    former: PartitionSources | None = None,
    kept: KeptPartitions = MappingProxyType({}),
) -> SessionSpec:
    """Assign ranks in the order of worker names, so that the same cluster always gets the same ranks.

    The workers of a host have consecutive ranks.

    Only the workers whose addresses are in ``ready`` take part. Their first partitions are read from ``former`` ones.
    Otherwise they are read from partitions that were ``kept`` on the workers' disks, if there are any. Workers of an
    earlier session that this one does not itself follow get the ranks whose partitions they have.
    """
    workers = in_rank_order(worker for where, worker in scheduler.workers.items() if where in ready)
    server = _find_server(workers, order.options.server, may_be_lost=order.former is not None)
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
    ranks, carried, choice = [worker.address for worker in training], order.carried, None
    if former is None:
        choice = choose_kept(kept, order.kept_as, plan, ranks, None if carried is None else carried.history)
    elif order.former is None:
        present = {rank: [address] for rank, (address, _) in former.holders.items() if address in ranks}
        choice = former, _placed(present, ranks)
    if choice is not None:
        former, ranks = choice
        carried = None if carried is None else carried.placed(former, ranks)
    elif order.start.trained and carried is not None and carried.places and len(ranks) == carried.history.n_workers:
        # What is left of an epoch is counted by rank: ranks stay, and new workers take those of lost ones.
        ranks = _placed({rank: [where] for where, rank in carried.places.items() if where in ranks}, ranks)
        carried = dataclasses.replace(carried, places={where: rank for rank, where in enumerate(ranks)})
    training = [scheduler.workers[address] for address in ranks]
    weights = _weights(order, training, carried, plan)
    if carried is not None:
        plan = carried.onto(plan, ranks, weights)
    else:
        plan = dataclasses.replace(plan, first_weights=weights)
    # Number of each worker's host; empty if all are on one host, or each on its own.
    hosts = {name: number for number, name in enumerate(dict.fromkeys(worker.host for worker in training))}
    if 1 < len(hosts) < len(training):
        plan = dataclasses.replace(plan, hosts=tuple(hosts[worker.host] for worker in training))
    addresses = dict(enumerate(ranks))
    if any(get_delivery(name).needs_server for name in order.deliveries):
        addresses[SERVER] = ranks[0] if server is None else server.address
    return SessionSpec(
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


def _find_server(workers: list[WorkerState], server: str | None, *, may_be_lost: bool) -> WorkerState | None:
    named = [worker for worker in workers if server in (worker.address, str(worker.name))]
    if not named and server is not None and not may_be_lost:
        raise InvalidParameter.of("server", server, f"the name or address of one of these workers: {in_words(workers)}")
    return next(iter(named or [worker for worker in workers if only_serves(worker.resources)]), None)


def in_rank_order(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Workers in the order of their names, but all workers of a host after its first one."""
    ordered = sorted(workers, key=by_name)
    hosts = {worker.host: place for place, worker in reversed(list(enumerate(ordered)))}
    return sorted(ordered, key=lambda worker: hosts[worker.host])  # keeps the order of a host's workers


def by_name(worker: WorkerState) -> tuple[bool, int, str, str]:
    """Sort key: numeric names by value, then other names; the address breaks ties."""
    name = str(worker.name)
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name, worker.address


class Candidates:
    """Workers that may take lost ranks of one session."""

    def __init__(self, scheduler: Scheduler, spec: SessionSpec) -> None:
        self._scheduler = scheduler
        self._spec = spec
        # Members are remembered with their names and nannies, because Dask forgets lost workers.
        self.members = {
            where: scheduler.workers[where] for where in spec.addresses.values() if where in scheduler.workers
        }
        self.refused: dict[str, float] = {}  # until when workers that could not take a rank are not asked

    async def find(self, lost: str, members: Collection[str], *, serves: bool) -> WorkerState | None:
        """A worker that runs tasks, is set up and is not a member; preferably with the name of the lost one.

        Only a server can be replaced by a worker that does not train, and preferably is.
        """
        now, name = asyncio.get_running_loop().time(), self.members[lost].name if lost in self.members else None
        candidates = [
            worker
            for worker in self._scheduler.workers.values()
            if worker.address not in members
            and self.refused.get(worker.address, now) <= now
            and worker.status == Status.running
            and self._spec.choice.allows(worker)
            and (serves or not only_serves(worker.resources))
        ]
        candidates.sort(
            key=lambda worker: (worker.name != name, serves and not only_serves(worker.resources), by_name(worker))
        )
        replies = await ask_all(self._scheduler, [worker.address for worker in candidates], ANSWER_WITHIN)
        fit = []
        for worker in candidates:
            if why := why_unfit(replies[worker.address]):
                logger.debug("dshuffle: %s cannot take a rank: it %s", worker.address, why)
            else:
                fit.append(worker)
        return next(iter(fit), None)

    async def may_come(self, lost: str) -> bool:
        """Whether a worker may still come.

        The cluster starts new ones, or one is starting or was refused, or a nanny may start the lost one again.
        """
        present = [worker for worker in self._scheduler.workers.values() if self._spec.choice.allows(worker)]
        starts = any(
            each.status in (Status.init, Status.starting) or self.refused.get(each.address, math.inf) < math.inf
            for each in present
        )
        if self._spec.settings.new_workers or starts:
            return True
        member = self.members.get(lost)
        if member is None or not member.nanny:
            return False
        try:  # not through Dask, which tries again for half a minute if a connection is refused
            _, writer = await within(ANSWER_WITHIN, asyncio.open_connection(*get_address_host_port(member.nanny)))
            writer.close()
        except ConnectionRefusedError:
            return False
        except (OSError, ValueError, NotImplementedError) as error:  # the nanny may be busy, or its address has no port
            logger.debug("dshuffle: the nanny at %s could not be reached: %r", member.nanny, error)
        return True
