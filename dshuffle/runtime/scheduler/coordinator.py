"""One session as the scheduler sees it: attempts (runs), votes, and the two-phase commit.

Phase one: every participant exchanges into free slots and votes, ready or failed. Phase two: when all are ready and
the client moves on, all are told to swap. A run that fails is aborted everywhere and everybody stays on the epoch
before; the next attempt has a new run id, and messages of the old one are refused by number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, WorkerLost
from dshuffle.planning import SERVER, AutoDelivery, name_of
from dshuffle.runtime.cluster_view import Members
from dshuffle.runtime.measure.processors import least_idle
from dshuffle.runtime.replies import Reply, unwrap

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Run:
    """One attempt at one epoch, and the votes on it."""

    run_id: int
    epoch: int
    delivery: str
    started: float
    votes: dict[int, dict[str, Any]] = field(default_factory=dict)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    ready_after: float = 0.0
    error: DShuffleError | None = None


class Coordinator:
    """Drives the members of one session from epoch to epoch.

    Parameters
    ----------
    scheduler
        The Dask scheduler, for its comms and its tasks.
    members
        Ranks and server.
    client_id
        The client whose session this is.
    deliveries
        Chooses each epoch's.
    """

    def __init__(self, scheduler: Scheduler, members: Members, client_id: str, deliveries: AutoDelivery) -> None:
        self.members = members
        self.client_id = client_id
        self.epoch = -1
        self._scheduler = scheduler
        self._spec = members.spec
        self._runs = 0
        self._deliveries = deliveries
        self._chosen: tuple[int, str] = (-1, "")
        self._run: Run | None = None
        self._answer: dict[str, Any] = {}
        self._broken: DShuffleError | None = None
        self._lock = asyncio.Lock()

    @property
    def participants(self) -> list[int]:
        """Ranks, and the server if it is a worker of its own: one vote each."""
        return [who for who in self._spec.addresses if who != SERVER or self.members.server_role == "dedicated"]

    async def open(self) -> None:
        """Set the session up on all members; on a failure, on none."""
        await self._tell_all("dshuffle_open", spec=ToPickle(self._spec))

    async def begin(self) -> None:
        """Start the next epoch's exchange unless it is under way."""
        async with self._lock:
            await self._begin()

    async def advance(self, epoch: int) -> dict[str, Any]:
        """Wait for an epoch's exchange, have all members swap to it, and say what was measured.

        A client that did not get the answer asks again for the same epoch, and gets it without another swap.

        Raises
        ------
        ExchangeError
            If the exchange failed; all members are still on the epoch before, and another call tries again.
        WorkerLost
            If a member has left, which is the end of the session, or cannot be reached.
        """
        async with self._lock:
            if epoch == self.epoch and self._broken is None:
                return dict(self._answer)
            if epoch != self.epoch + 1:
                raise ClusterError(f"epoch {epoch} was asked for, and the workers are on epoch {self.epoch}")
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
        """A member's vote on a run."""
        run = self._run
        if run is None or run.run_id != run_id or run.decided.is_set():
            return  # a vote on an attempt that is over
        if reason is not None:
            where = self._spec.addresses[participant]
            run.error = ExchangeError(
                f"epoch {run.epoch} could not be exchanged: {name_of(participant)} ({where}): {reason}"
            )
            run.decided.set()
            return
        run.votes[participant] = vote
        if len(run.votes) == len(self.participants):
            run.ready_after = time.perf_counter() - run.started
            run.error = self._check_votes(run)
            run.decided.set()
            if run.error is None:
                if run.epoch:  # epoch 0 is loaded
                    self._deliveries.observe(run.delivery, run.ready_after)
                # Not before: planning would take cores from members that are still exchanging.
                self._scheduler._ongoing_background_tasks.call_soon(self._plan_ahead, run)

    def lose(self, address: str) -> None:
        """A member has left the cluster."""
        self.break_(self._lost(address, "has left the cluster, and its partition with it. The dataset is untouched"))

    def break_(self, error: DShuffleError) -> None:
        """End the session: whoever waits for it gets the error."""
        self._broken = error
        if self._run is not None:
            self._run.error = error
            self._run.decided.set()

    async def training_seconds(self) -> list[float]:
        """Seconds of training by rank since the last commit."""
        replies = await self._tell_all("dshuffle_training")
        return [replies[rank]["training_seconds"] for rank in self._ranks]

    async def close(self) -> None:
        """Free everything on the members that are left."""
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
        return WorkerLost(f"{who} ({address}) {how}: make a new Shuffler on the workers that are left")

    @property
    def _ranks(self) -> range:
        return range(self._spec.plan.n_workers)

    async def _begin(self) -> Run:
        if self._broken is not None:
            raise self._broken
        if self._run is None:
            self._runs += 1
            epoch = self.epoch + 1
            self._run = run = Run(self._runs, epoch, self._delivery_of(epoch), time.perf_counter())
            try:
                await self._tell_all("dshuffle_begin", run_id=run.run_id, epoch=run.epoch, delivery=run.delivery)
            except DShuffleError as error:
                run.error = run.error or error
                run.decided.set()
        return self._run

    async def _plan_ahead(self, run: Run) -> None:
        try:
            delivery = self._delivery_of(run.epoch + 1)
            await self._tell_all("dshuffle_plan_ahead", run_id=run.run_id, delivery=delivery)
        except DShuffleError as error:  # the next epoch plans for itself
            logger.debug("dshuffle: no plan ahead after run %d: %s", run.run_id, error)

    def _delivery_of(self, epoch: int) -> str:
        """Chosen once for an epoch: members may have planned it already when it is tried again."""
        if self._chosen[0] != epoch:
            self._chosen = epoch, self._deliveries.choose()
        return self._chosen[1]

    async def _commit(self, run: Run) -> dict[int, Reply]:
        """Phase two. A member that cannot swap now never will: the session is broken, loudly."""
        try:
            return await self._tell_all("dshuffle_commit", run_id=run.run_id)
        except DShuffleError as error:
            self.break_(
                error
                if isinstance(error, WorkerLost)
                else ClusterError(f"epoch {run.epoch} was ready everywhere and could not be committed: {error}")
            )
            assert self._broken is not None
            raise self._broken from error

    def _check_votes(self, run: Run) -> DShuffleError | None:
        """All members must have made the same plan, and what arrived must be what was needed."""
        digests = {vote["digest"] for vote in run.votes.values()}
        if len(digests) > 1:
            return ExchangeError(
                f"epoch {run.epoch}: the members made different plans; do all have the same version of dshuffle?"
            )
        expected = next(iter(run.votes.values()))["expected"]
        arrived = sum(vote["rows"] for vote in run.votes.values())
        if arrived != expected:
            return ExchangeError(f"epoch {run.epoch}: {arrived} rows arrived and {expected} were expected")
        return None

    def _measures(self, run: Run, replies: dict[int, Reply], waited: float) -> dict[str, Any]:
        vote = next(iter(run.votes.values()))
        reports = {who: replies[who]["report"] for who in self.participants}

        def slowest(name: str) -> float:
            return float(max(report[name] for report in reports.values()))

        def total(name: str) -> int:
            return int(sum(report[name] for report in reports.values()))

        return {
            "epoch": run.epoch,
            "run_id": run.run_id,
            "delivery": run.delivery if run.epoch else "load",
            "needed": vote["needed"],
            "packets": vote["packets"],
            "components": vote["expected"],
            "relay": self._spec.plan.relay if vote["coded"] else "",
            "wire_sent_bytes": [reports[rank]["sent_bytes"] for rank in self._ranks],
            "wire_received_bytes": [reports[rank]["received_bytes"] for rank in self._ranks],
            "server_sent_bytes": total("server_sent_bytes"),
            "metadata_bytes": total("metadata_bytes"),
            "store_requests": total("store_requests"),
            "store_bytes": total("store_bytes"),
            "store_delivered_bytes": total("store_delivered_bytes"),
            "store_retries": total("store_retries"),
            "store_cache_hits": total("store_cache_hits"),
            "plan_seconds": slowest("plan_seconds"),
            "gather_seconds": slowest("gather_seconds"),
            "transfer_seconds": slowest("transfer_seconds"),
            "scatter_seconds": slowest("scatter_seconds"),
            "encode_seconds": slowest("encode_seconds"),
            "decode_seconds": slowest("decode_seconds"),
            "store_seconds": slowest("store_seconds"),
            "commit_seconds": slowest("commit_seconds"),
            "exchange_seconds": run.ready_after,
            "waited_seconds": waited,
            "cpu_idle": least_idle(report["cpu_idle"] for report in reports.values()),
            "training_seconds_before": [reports[rank]["training_seconds"] for rank in self._ranks],
        }

    async def _tell_all(self, op: str, **message: Any) -> dict[int, Reply]:
        """Send to all participants at once; the first error is raised when all have answered."""
        if self._broken is not None:
            raise self._broken
        replies = await asyncio.gather(
            *(self._tell(self._spec.addresses[who], op, **message) for who in self.participants),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, DShuffleError):
                raise self._broken or reply
            if isinstance(reply, BaseException):
                raise ClusterError(f"{op} failed: {type(reply).__name__}: {reply}") from reply
        return dict(zip(self.participants, replies, strict=True))  # type: ignore[arg-type]

    async def _tell(self, address: str, op: str, **message: Any) -> Reply:
        if op != "dshuffle_open":
            message["session_id"] = self._spec.session_id
        try:
            reply = await getattr(self._scheduler.rpc(address), op)(**message)
        except OSError as error:
            # A call can notice before the scheduler does that a member is gone.
            how = f"cannot be reached ({type(error).__name__}: {error}). If it has left the cluster"
            raise self._lost(address, how) from error
        try:
            return unwrap(reply, f"worker {address}")
        except DShuffleError as error:
            raise type(error)(f"worker {address}: {error}") from error
