"""What clients and workers ask of an open session, beside its epochs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed.metrics import time

from dshuffle.errors import ClusterError, WorkerLost
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.messages import MemberChanges, TrainedSamples, TrainingTime, UnfinishedTask
from dshuffle.runtime.metrics import count_training
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.driver import TICK
from dshuffle.runtime.scheduler.participants import ParticipantUnreachable
from dshuffle.runtime.scheduler.training_workers import member_changes

logger = logging.getLogger(__name__)


async def training_times(session: Coordinator) -> list[TrainingTime]:
    """Time of training since the last commit, by rank. A rank whose worker is lost counts 0."""
    session.check()

    async def of(rank: int) -> TrainingTime:
        if rank in session.machine.unsettled:
            return TrainingTime()
        return await session.participants.ask(TrainingTime, "training", rank)

    times = await asyncio.gather(*map(of, session.ranks))
    count_training(times)
    return times


async def trained_samples(session: Coordinator) -> TrainedSamples:
    """The current epoch, how many of its samples each rank has trained on, and the digest of all of these.

    Raises
    ------
    ClusterError
        If a worker does not answer.
    """
    session.check()
    epoch = session.epoch
    digests = await asyncio.gather(*(_trained_by(session, rank, epoch) for rank in session.ranks))
    counts = tuple(digest.count for digest in digests)
    return TrainedSamples(epoch=epoch, counts=counts, digest=SampleDigest.summed(digest.fields for digest in digests))


async def _trained_by(session: Coordinator, rank: int, epoch: int) -> SampleDigest:
    loop, settings = asyncio.get_running_loop(), session.settings
    began = loop.time()
    while rank not in session.machine.unsettled:
        try:
            return await session.participants.ask(SampleDigest, "trained", rank, epoch=epoch)
        except WorkerLost as error:  # perhaps nobody has noticed that it is lost, or a task blocks it
            seconds = loop.time() - began
            may_be_busy = isinstance(error, ParticipantUnreachable) and seconds < settings.timeout
            if seconds >= settings.heartbeat and not (may_be_busy and await session.process_runs(rank, seconds)):
                raise
        await asyncio.sleep(TICK)
        session.check()
    return SampleDigest()  # the task of a lost worker runs again


def unfinished_tasks(session: Coordinator, epoch: int, calls: list[int]) -> list[UnfinishedTask]:
    """The tasks of some calls in an epoch that did not finish, each with its outcome."""
    return session.outcomes.unfinished(epoch, calls, len(session.ranks))


def silent_tasks(session: Coordinator) -> list[str]:
    """Which members run tasks and have not answered Dask for a heartbeat, in words."""
    reasons = []
    for rank, address in session.addresses.items():
        worker = session.scheduler.workers.get(address)
        silent = 0.0 if worker is None or not worker.processing else time() - worker.last_seen
        if silent >= session.settings.heartbeat:
            name = session.participants.name_of(rank)
            reasons.append(
                f"waiting for tasks on {name}, which has not answered for {silent:.0f} s: it is stopped or cut off, "
                "or a task holds Python's global lock"
            )
    return reasons


def member_addresses(session: Coordinator) -> dict[int, str]:
    """Address of every rank, and of the server."""
    return dict(session.addresses)


def membership(session: Coordinator) -> MemberChanges:
    """How the workers of the cluster differ from the members."""
    session.check()
    return member_changes(session.scheduler, session.choice, session.addresses, session.machine.adopted)


def substitute_reader(session: Coordinator, load: str, address: str, reason: str) -> str:
    """Address of the worker that reads the store in place of one that is late or lost."""
    session.check()
    return session.participants.reader_for(load, address, session.machine.unsettled, reason)


def end_collective(session: Coordinator, address: str, **call: Any) -> None:
    """Fail the ranks that wait for a mean at rank 0. If rank 0 has left this address, nobody waits there."""
    if session.addresses[0] == address:
        session.driver.spawn(_end_collective(session, **call))


async def _end_collective(session: Coordinator, reason: str, **call: Any) -> None:
    try:
        await session.participants.ask(type(None), "end_collective", 0, reason=reason, **call)
    except ClusterError as error:  # its worker or the call has ended
        logger.debug("dshuffle: rank 0 could not be told that %s: %s", reason, error)
