"""One session on the scheduler: its runs, votes, and two-phase commit.

Phase one: every participant receives rows into free slots and votes ready or failed. Phase two: once all are ready and
the client moves on, all participants are told to swap. If a run fails, it is aborted everywhere and all participants
stay on the previous epoch. The next attempt gets a new run id, so that messages of the old run can be refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, WorkerLost
from dshuffle.planning import SERVER, AutoDelivery, get_delivery, name_of
from dshuffle.records import Measures
from dshuffle.runtime.cluster_view import Members
from dshuffle.runtime.replies import Reply, unwrap

logger = logging.getLogger(__name__)

CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""


@dataclass(slots=True)
class Run:
    """One attempt at an epoch's exchange, and the votes on it."""

    run_id: int
    epoch: int
    delivery: str
    started: float
    votes: dict[int, dict[str, Any]] = field(default_factory=dict)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    ready_after: float = 0.0
    error: DShuffleError | None = None


class Coordinator:
    """Coordinator that moves the participants of one session from epoch to epoch.

    Parameters
    ----------
    scheduler
        The Dask scheduler, used for its comms and background tasks.
    members
        Ranks and server of the session.
    client_id
        Client that owns the session.
    deliveries
        Chooses the delivery of each epoch.
    """

    def __init__(self, scheduler: Scheduler, members: Members, client_id: str, deliveries: AutoDelivery) -> None:
        self.members = members
        self.client_id = client_id
        self.epoch = members.spec.shuffle.first_epoch - 1
        self._scheduler = scheduler
        self._spec = members.spec
        # All ranks, and the server if it is dedicated. Each has one vote.
        dedicated = members.server_role == "dedicated"
        self._participants = [who for who in self._spec.addresses if who != SERVER or dedicated]
        self._runs = 0
        self._deliveries = deliveries
        self._chosen: tuple[int, str] = (-1, "")
        self._run: Run | None = None
        self._answer: dict[str, Any] = {}
        self._rate: float | None = None
        self._broken: DShuffleError | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Open the session on all participants."""
        await self._tell_all("dshuffle_open", spec=ToPickle(self._spec))

    async def begin(self) -> None:
        """Start the next epoch's exchange unless it has already started."""
        async with self._lock:
            await self._begin()

    async def advance(self, epoch: int) -> dict[str, Any]:
        """Wait for an epoch's exchange, make all participants swap to it, and return the measurements.

        A client that did not receive the answer may ask for the same epoch again. It gets the same answer without
        another swap.

        Raises
        ------
        ExchangeError
            If the exchange failed. All participants are still on the previous epoch, and another call tries again.
        WorkerLost
            If a participant has left the cluster or cannot be reached. A participant that leaves ends the session.
        """
        async with self._lock:
            if epoch == self.epoch and self._broken is None:
                return dict(self._answer)
            if epoch != self.epoch + 1:
                raise ClusterError(
                    f"the workers are on epoch {self.epoch} and cannot move to epoch {epoch}, which is not the next one"
                )
            asked = time.perf_counter()
            run = await self._begin()
            await run.decided.wait()
            waited = time.perf_counter() - asked
            if run.error is not None:
                self._run = None
                if self._broken is None:
                    await self._tell_all("dshuffle_abort")
                raise run.error
            replies = await self._commit(run)
            self._answer = self._measures(run, replies, waited)
            self.epoch, self._run = run.epoch, None
            return dict(self._answer)

    def report(self, run_id: int, participant: int, reason: str | None, vote: dict[str, Any]) -> None:
        """Record the vote of a participant on a run."""
        run = self._run
        if run is None or run.run_id != run_id or run.decided.is_set():
            return  # the run is already over
        if reason is not None:
            where = self._spec.addresses[participant]
            run.error = ExchangeError(
                f"epoch {run.epoch} could not be exchanged: {name_of(participant)} ({where}): {reason}"
            )
            run.decided.set()
            return
        run.votes[participant] = vote
        if len(run.votes) == len(self._participants):
            run.ready_after = time.perf_counter() - run.started
            run.error = self._check_votes(run)
            run.decided.set()
            if run.error is None:
                if run.epoch != self._spec.shuffle.first_epoch:  # that is loaded from the store, whatever the delivery
                    self._deliveries.observe(run.delivery, run.ready_after)
                # Not earlier: planning would take cores from participants that are still exchanging.
                self._scheduler._ongoing_background_tasks.call_soon(self._plan_ahead, run)

    def lose(self, address: str) -> None:
        """End the session because a participant has left the cluster."""
        self.break_(
            self._lost(address, "has left the cluster and its partition is lost. The dataset is untouched. To continue")
        )

    def break_(self, error: DShuffleError) -> None:
        """End the session and raise the error in all current and future calls."""
        self._broken = error
        if self._run is not None:
            self._run.error = error
            self._run.decided.set()

    async def training_seconds(self) -> list[float]:
        """Seconds of training since the last commit, by rank."""
        replies = await self._tell_all("dshuffle_training")
        return [replies[rank]["training_seconds"] for rank in self._ranks]

    async def close(self) -> None:
        """Close the session on all participants that are still in the cluster."""
        self.break_(ClusterError("this session has been closed"))
        there = [where for where in set(self._spec.addresses.values()) if where in self._scheduler.workers]
        replies = await asyncio.gather(
            *(self._tell(where, "dshuffle_close") for where in there), return_exceptions=True
        )
        for where, reply in zip(there, replies, strict=True):
            if isinstance(reply, BaseException):
                logger.warning("dshuffle: session %s was not closed on %s: %s", self._spec.session_id, where, reply)

    def _lost(self, address: str, how: str) -> WorkerLost:
        ranks = sorted(who for who, where in self._spec.addresses.items() if where == address)
        who = " and ".join(map(name_of, ranks))
        return WorkerLost(f"{who} ({address}) {how}, make a new Shuffler on the remaining workers")

    @property
    def _ranks(self) -> range:
        return range(self._spec.shuffle.n_workers)

    async def _begin(self) -> Run:
        if self._broken is not None:
            raise self._broken
        if self._run is None:
            self._runs += 1
            epoch = self.epoch + 1
            self._run = run = Run(self._runs, epoch, self._delivery_of(epoch), time.perf_counter())
            try:
                await self._tell_all(
                    "dshuffle_begin", run_id=run.run_id, epoch=run.epoch, delivery=run.delivery, rate=self._rate
                )
            except DShuffleError as error:
                run.error = run.error or error
                run.decided.set()
        return self._run

    async def _plan_ahead(self, run: Run) -> None:
        try:
            delivery = self._delivery_of(run.epoch + 1)
            await self._tell_all("dshuffle_plan_ahead", run_id=run.run_id, delivery=delivery)
        except DShuffleError as error:  # harmless: the next run plans its epoch if no plan exists
            logger.debug("dshuffle: planning ahead failed after run %d: %s", run.run_id, error)

    def _delivery_of(self, epoch: int) -> str:
        """Delivery of an epoch. It is chosen once, because a retry may find the epoch already planned."""
        if self._chosen[0] != epoch:
            self._chosen = epoch, self._deliveries.choose()
        return self._chosen[1]

    async def _commit(self, run: Run) -> dict[int, Reply]:
        """Run phase two. If a participant cannot swap now, it never can, so the session ends with an error."""
        try:
            return await self._tell_all("dshuffle_commit", run_id=run.run_id)
        except DShuffleError as error:
            self.break_(
                error
                if isinstance(error, WorkerLost)
                else ClusterError(f"all workers were ready for epoch {run.epoch}, but the commit failed: {error}")
            )
            assert self._broken is not None
            raise self._broken from error

    def _check_votes(self, run: Run) -> DShuffleError | None:
        """Check that all participants made the same plan and that the expected number of rows arrived."""
        digests = {vote["digest"] for vote in run.votes.values()}
        if len(digests) > 1:
            return ExchangeError(
                f"epoch {run.epoch}: the workers made different plans. Install the same version of dshuffle on all of "
                "them"
            )
        totals = _totals(run.votes.values())
        arrived = sum(vote["rows"] for vote in run.votes.values())
        if arrived != totals["expected"]:
            return ExchangeError(f"epoch {run.epoch}: {arrived} rows arrived, but {totals['expected']} were expected")
        if totals.get("leaving") != totals.get("arriving"):
            return ExchangeError(
                f"epoch {run.epoch}: the workers planned to send {totals['leaving']} rows and to receive "
                f"{totals['arriving']}. Install the same version of dshuffle on all of them"
            )
        return None

    def _measures(self, run: Run, replies: dict[int, Reply], waited: float) -> dict[str, Any]:
        totals = _totals(run.votes.values())
        reports = [replies[who]["report"] for who in self._participants]
        measured = [Measures.from_dict(report["measures"]) for report in reports]
        measures = Measures.combined(measured)
        if not get_delivery(run.delivery).needs_server:  # a server's link is shared by all workers
            self._rate = _next_rate(self._rate, _rate_of(measured, measures.cpu_idle))
        return {
            "epoch": run.epoch,
            "run_id": run.run_id,
            "delivery": run.delivery,
            "needed": totals["needed"],
            "packets": totals["packets"],
            "components": totals["expected"],
            "exchange_seconds": run.ready_after,
            "waited_seconds": waited,
            "training_seconds_before": [report["training_seconds"] for report in reports[: len(self._ranks)]],
            "measures": measures.to_dict(),
        }

    async def _tell_all(self, op: str, **message: Any) -> dict[int, Reply]:
        """Send a message to all participants at once. Raise the first error once all have answered."""
        if self._broken is not None:
            raise self._broken
        replies = await asyncio.gather(
            *(self._tell(self._spec.addresses[who], op, **message) for who in self._participants),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, DShuffleError):
                raise self._broken or reply
            if isinstance(reply, BaseException):
                raise ClusterError(f"{op} failed: {type(reply).__name__}: {reply}") from reply
        return dict(zip(self._participants, replies, strict=True))  # type: ignore[arg-type]

    async def _tell(self, address: str, op: str, **message: Any) -> Reply:
        if op != "dshuffle_open":
            message["session_id"] = self._spec.session_id
        try:
            reply = await getattr(self._scheduler.rpc(address), op)(**message)
        except OSError as error:
            # A call may notice that a participant is gone before the scheduler does.
            how = f"cannot be reached ({type(error).__name__}: {error}). If it has left the cluster"
            raise self._lost(address, how) from error
        try:
            return unwrap(reply, f"worker {address}")
        except DShuffleError as error:
            raise type(error)(f"worker {address}: {error}") from error


def _next_rate(before: float | None, measured: float | None) -> float | None:
    """The rate for the next exchange. It falls by half at most, so that one slow exchange does not decide."""
    if before is None or measured is None:
        return measured or before
    return measured if math.isinf(before) else max(measured, before / 2)


def _rate_of(measured: Iterable[Measures], cpu_idle: float) -> float | None:
    """Median rate of messages into a worker, in bytes per second; None if next to nothing was sent.

    If processors were the limit, links may be faster, and messages should be long: each of them costs processor time.
    """
    rates = [
        sum(one.wire_received_bytes) / one.transfer_seconds
        for one in measured
        if sum(one.wire_received_bytes) > TIMED_NBYTES and one.transfer_seconds > 0
    ]
    if not rates:
        return None
    return statistics.median(rates) if cpu_idle >= CPU_BOUND else math.inf


def _totals(votes: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Samples and packets of an epoch: sums over workers that planned their own parts, else what all of them found."""
    found = list(votes)
    names = {"needed", "packets", "expected", "leaving", "arriving"} & found[0].keys()
    if "leaving" in names:
        return {name: sum(vote[name] for vote in found) for name in names}
    return {name: found[0][name] for name in names}
