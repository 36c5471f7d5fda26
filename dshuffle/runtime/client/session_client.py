"""Sessions as a client sees them: calls to the scheduler that end, one session, and those that follow one another."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Client
from distributed.protocol.pickle import dumps

from dshuffle.errors import CacheBudgetError, ClusterError, DShuffleError, ExchangeError, WorkerLost, what_happened
from dshuffle.planning import SERVER, Choices, Remainder
from dshuffle.planning.exchange_epochs import LARGEST_WEIGHT, Weights
from dshuffle.planning.shares import ShareBounds
from dshuffle.records import EpochRecord
from dshuffle.runtime.client.cluster_view import (
    address_of,
    answer,
    limit_of,
    resolved_choice,
    wait_for_workers,
)
from dshuffle.runtime.collective import CollectiveId
from dshuffle.runtime.messages import (
    EpochExchange,
    MemberChanges,
    OpenedSession,
    TrainingTime,
    message_in,
    retrieve,
    within,
)
from dshuffle.runtime.scheduler.members import SETUP_TIMEOUT, server_role
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.session_spec import PROTOCOL, DatasetReference, EarlierWorkers, SessionOptions, SessionRequest
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 15.0
"""Seconds after which a call says whom it waits for; then after twice that time, and so on."""

RECONNECT = 15.0
"""Seconds that a call waits for the client to be connected again."""

SETUP_MARGIN = 15.0
"""Seconds for the answer of a scheduler that has waited for slow workers as long as it does."""

LEAVE_WITHIN = 4.0
"""Seconds that all calls together wait for a scheduler that does not answer, once a shuffler is being closed."""

LOOK = 0.5
"""Seconds between two looks at the connection while a call waits."""

CLOSE_AGAIN_AFTER = 0.5
"""Seconds between two attempts to close a session in the background."""

ATTEMPTS = 3
"""Sessions that are opened for an epoch before the epoch counts as failed."""


def install_plugin(client: Client) -> None:
    """Install the scheduler plugin, which installs the worker plugin."""
    scheduler: Any = client.scheduler
    plugin, seconds = DShuffleScheduler(), max(limit_of(), SETUP_TIMEOUT + SETUP_MARGIN)
    name = f"the scheduler at {address_of(client)}"
    try:
        client.sync(lambda: within(RECONNECT, scheduler.identity(n_workers=0)))
    except OSError as error:
        raise ClusterError(_is_gone(client, error)) from error
    try:
        register = client._register_scheduler_plugin
        answer(client, lambda: register(plugin, plugin.name, plugin.idempotent), name, seconds)
    except OSError as error:  # a worker or a connection was lost, or it takes too long
        raise ClusterError(
            f"dshuffle could not be set up on all workers ({type(error).__name__}: {error}). Try again, end workers "
            "that hang, or wait longer (dshuffle.timeout)"
        ) from error
    except Exception as error:  # errors of the scheduler arrive as they were raised there
        raise ClusterError(
            f"dshuffle could not be set up on {name} ({type(error).__name__}: {error}). Make sure that the same "
            "version of dshuffle is installed there and on all workers",
            transient=False,
        ) from error


def _is_gone(client: Client, reason: object) -> str:
    return (
        f"the scheduler at {address_of(client)} does not answer ({reason}): it has died, or cannot be reached from "
        "here. Make a new Client and a new Shuffler"
    )


@dataclass
class Silence:
    """How long the scheduler has not answered any session of a shuffler.

    ``leaving`` says whether the shuffler is being closed, and ``lost`` whether the client has been without a connection
    since then.
    """

    leaving: bool = False
    reason: str = ""
    lost: bool = False
    since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the scheduler was found not to answer; 0 if it answers."""
        return 0.0 if self.since is None else time.monotonic() - self.since

    @property
    def is_too_long(self) -> bool:
        """Whether the scheduler counts as gone."""
        return self.seconds >= (LEAVE_WITHIN if self.leaving else RECONNECT)

    def begin(self, since: float, reason: object, *, lost: bool = False) -> None:
        """Note that the scheduler does not answer, since some time at the latest."""
        self.lost |= lost
        if self.since is None:
            self.since, self.reason = since, str(reason) or type(reason).__name__

    def end(self) -> None:
        """Note an answer, or a new connection."""
        self.since, self.lost = None, False


class SessionClient:
    """Calls of one session. They say what they wait for, and survive a lost connection."""

    def __init__(self, client: Client, session_id: str, silence: Silence | None = None) -> None:
        self.client, self.session_id = client, session_id
        self.silence = silence or Silence()  # what earlier sessions of the same shuffler know
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the session. It has no connection of its own."""
        return os.getpid() != self._process

    @property
    def connected(self) -> bool:
        """Whether the client is connected to the scheduler, or about to be connected again."""
        return not self.forked and self.client.status in ("running", "connecting")

    def check_process(self) -> None:
        """Refuse to go on in a forked process, where no call would ever be answered."""
        if self.forked:
            raise ClusterError(
                f"this Shuffler works only in process {self._process}, which made it, because the connections of its "
                f"Dask client belong to that process. This is process {os.getpid()}, which was forked later. Make a "
                "Client and a Shuffler here, or pass arrays to this process instead",
                transient=False,
            )

    def tell(self, operation: str, **message: Any) -> None:
        """Call an operation of the scheduler that returns nothing, or raise its error."""
        self.ask(type(None), operation, **message)

    def ask(self, kind: type[T], operation: str, **message: Any) -> T:
        """Call an operation of the scheduler, and return the message in its reply, or raise its error."""
        self.check_process()
        while True:
            if not self.connected:
                raise ClusterError(f"the Dask client is {self.client.status}. Make a new Client and a new Shuffler")
            if self.silence.leaving and self.silence.is_too_long:  # another call has waited for it
                raise ClusterError(_is_gone(self.client, self.silence.reason))
            try:
                reply = self.client.sync(self._call, operation, message)
            except OSError as error:
                self.silence.begin(time.monotonic(), error, lost=self.client.status != "running")
                if operation == "open" or self.silence.is_too_long:
                    raise ClusterError(_is_gone(self.client, self.silence.reason)) from error
                time.sleep(0.2)  # the client may be connecting again
            else:
                self.silence.end()
                return message_in(reply, kind, "the scheduler")

    async def _call(self, operation: str, message: dict[str, Any]) -> Any:
        # A scheduler that is connected and does not answer is busy, or waits for a worker: the log says for which. It
        # counts as gone only while the shuffler is being closed. OSError: it is gone, or away for too long.
        handler = getattr(self.client.scheduler, f"dshuffle_{operation}")
        call = asyncio.ensure_future(handler(session_id=self.session_id, **message))
        call.add_done_callback(retrieve)
        began = heard = time.monotonic()
        patience = PATIENCE
        try:
            while not (await asyncio.wait([call], timeout=LOOK))[0]:
                if self.client.status != "running":  # a call by itself takes half a minute to notice
                    self.silence.begin(time.monotonic(), "its connection was lost", lost=True)
                    if self.silence.is_too_long:
                        raise TimeoutError(self.silence.reason)
                elif self.silence.lost:  # it is connected again, perhaps since an earlier attempt
                    self.silence.end()
                elif self.silence.leaving:
                    await self._check_alive(heard)
                    heard = time.monotonic()
                elif time.monotonic() - began >= patience:
                    patience *= 2
                    await self.say_why_now()
            return call.result()
        finally:
            call.cancel()

    async def _check_alive(self, since: float) -> None:
        # Raises OSError without a sign of life.
        try:
            await self._waiting(round(max(LOOK, LEAVE_WITHIN - (time.monotonic() - since)), 1))
        except DShuffleError:
            pass
        except OSError as error:
            self.silence.begin(since, error)
            raise
        self.silence.end()

    def say_why(self) -> None:
        """Log what tasks wait for. While the shuffler is being closed, raise an error if the scheduler is silent."""
        try:
            if self.silence.leaving:
                self.client.sync(self._check_alive, time.monotonic())
            else:
                self.client.sync(self.say_why_now, tasks=True)
        except OSError as error:
            raise ClusterError(_is_gone(self.client, error)) from error

    async def say_why_now(self, *, tasks: bool = False) -> None:
        """Log what the session waits for, or what its tasks wait for alone."""
        try:
            reason = await self._waiting(tasks=tasks)
        except (OSError, DShuffleError):
            reason = "waiting for the scheduler, which does not answer"
        if reason:
            logger.warning("dshuffle: %s", reason)

    async def _waiting(self, seconds: float = PATIENCE, *, tasks: bool = False) -> str:
        scheduler: Any = self.client.scheduler
        call = scheduler.dshuffle_waiting(session_id=self.session_id, tasks=tasks)
        return message_in(await within(seconds, call), str, "the scheduler")

    def close_soon(self) -> None:
        """Close the session without waiting: of a shuffler that was dropped, or whose scheduler did not answer.

        A client that is about to be connected again closes it then. Otherwise it would be open until the client leaves.
        """
        if not self.connected:
            return

        async def close() -> None:
            scheduler: Any = self.client.scheduler
            while self.connected:
                try:
                    await scheduler.dshuffle_close(session_id=self.session_id)
                    break
                except OSError:
                    await asyncio.sleep(CLOSE_AGAIN_AFTER)

        loop: Any = self.client.loop
        loop.add_callback(close)

    def end_collective(self, collective: CollectiveId, reason: str, *, transient: bool = True) -> None:
        """Fail all ranks that still wait for a mean of a call of :meth:`dshuffle.Epoch.together`.

        ``transient`` says whether another attempt can succeed.
        """
        try:
            call = {"number": collective.number, "reason": reason, "transient": transient}
            self.tell("end_collective", address=collective.address, **call)
        except ClusterError as error:  # the session is closed, or the client is, so nobody waits
            logger.debug("dshuffle: the ranks could not be told that %s: %s", reason, error)


def new_id() -> str:
    """Return an id for a session."""
    return uuid.uuid4().hex[:12]


def session_request(
    client: Client, dataset: Dataset, choices: Choices, options: SessionOptions, settings: Settings, **others: Any
) -> SessionRequest:
    """What a client asks for: a new session on the workers that are there, with these and other fields."""
    return SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        options=options,
        settings=settings,
        choice=resolved_choice(client, options),
        **others,
    )


class OpenSession(SessionClient):
    """Opens a session, and knows its workers."""

    def __init__(self, client: Client, request: SessionRequest, silence: Silence | None = None) -> None:
        super().__init__(client, request.session_id, silence)
        self.request = request
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                opened = self._open()
                break
            except CacheBudgetError as error:
                # Workers have freed the partitions that were to be read (transient), or some workers read kept
                # partitions whose room other workers of the same machine need.
                keeps = request.kept_as is not None and request.former is None and self.request.reads_kept
                if not attempts_left or not (error.transient or keeps):
                    raise
                # The scheduler has closed the session with the old id.
                self.session_id = new_id()
                self.request = dataclasses.replace(request, reads_kept=error.transient, session_id=self.session_id)
        if opened.left_out:
            logger.warning("dshuffle: these workers are paused and do not take part: %s", ", ".join(opened.left_out))
        self.addresses, self.history = opened.addresses, opened.history
        self.n_workers = self.history.n_workers

    def _open(self) -> OpenedSession:
        try:
            return self.ask(OpenedSession, "open", protocol=PROTOCOL, order=dumps(self.request))
        except BaseException:  # the scheduler does not notice Ctrl-C or a lost answer, and would keep the session
            self.close_soon()
            raise

    @property
    def server(self) -> str:
        """Role of the server, which may have been lost."""
        return server_role(self.addresses)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Addresses of the workers that train, in rank order."""
        return tuple(self.addresses[rank] for rank in range(self.n_workers))

    def look_up_members(self) -> bool:
        """Ask the scheduler for the addresses; whether ranks have other workers than at the last look."""
        before, self.addresses = self.addresses, self.ask(dict[int, str], "members")
        return before != self.addresses

    def successor(self, start: Remainder, weights: Weights | None = None) -> OpenSession:
        """Open a session that goes on with what is left of an epoch, on the workers that the cluster has now.

        Its workers read their first partitions from the workers of this session. With ``weights``, which are empty for
        equal shares, the same workers go on.
        """
        request = self.request
        carried = request.carried
        if start != request.start:  # else what is left is left by an earlier session
            places = {address: rank for rank, address in self.addresses.items() if rank != SERVER}
            carried = EarlierWorkers(self.history, start.epoch if start.trained else start.epoch - 1, places)
        shares = None
        if weights is not None:
            shares = dict(zip(self.ranks, weights or (LARGEST_WEIGHT,) * self.n_workers, strict=True))
        server = request.options.server if SERVER in self.addresses else None
        following = dataclasses.replace(
            request,
            session_id=new_id(),
            options=dataclasses.replace(request.options, server=server),
            start=start,
            former=request.session_id,
            carried=carried,
            weights=shares,
        )
        return OpenSession(self.client, following, self.silence)

    def close(self) -> None:
        """Free the partitions on all workers. A scheduler that does not answer is no error: no result is lost."""
        if self.connected:
            try:
                self.tell("close")
            except ClusterError as error:
                if not self.silence.seconds:
                    raise
                self.close_soon()  # a scheduler that is only slow closes it later
                logger.warning("dshuffle: the session may stay open until this client leaves: %s", error)


def proposed_weights(session: OpenSession, records: Sequence[EpochRecord]) -> Weights | None:
    """Other weights for the ranks of a session, as its policy says; None if they stay."""
    request, now = session.request, session.history.weights
    choices = request.choices
    epochs = [record.rank_training_seconds for record in records if record.first_epoch == request.start.epoch]
    bounds = ShareBounds.of(choices.assignment, choices.cache_fraction, request.dataset.n_samples, session.n_workers)
    weights = choices.shares.following(now, epochs, bounds)
    return None if weights == now else weights


class Membership:
    """The sessions of a shuffler, which begin with one.

    Another one follows when shares change. If the first one is elastic, another one also follows when workers join or
    leave the cluster, or are lost.
    """

    def __init__(self, session: OpenSession) -> None:
        self.current = session
        self.elastic = session.request.options.elastic
        self._following: OpenSession | None = None
        self._only_shares = False  # whether the following session has the workers of the current one
        self._exchanging = False  # whether the current session exchanges for the next epoch, which is not done twice
        # Workers with which no session could be opened, or the id of the session whose shares cannot change. (Measured
        # weights differ a little in every epoch, so others would fail like those that have failed.)
        self._refused: list[MemberChanges | str] = []

    def prefetch(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        """Start the exchange for the next epoch, on the workers that will train in it."""
        try:
            self._prepare(epoch, records)
            (self._following or self.current).tell("prefetch")
            self._exchanging = self._following is None
        except WorkerLost:
            if not self.elastic:  # else another session is opened when this one has to move on
                raise

    def advance(self, epoch: int, records: Sequence[EpochRecord]) -> EpochExchange:
        """Wait for the exchange for an epoch, let the workers swap to it, and return its measurements.

        All tasks of the epoch before must have ended. The parameters are those of :meth:`prefetch`.
        """
        start, training = self._start_of(epoch), None
        try:
            self._prepare(epoch, records)
            if self._only_shares:
                training = self.training(epoch)  # which counts from now on, also if the present session goes on
                try:
                    return self._take_over(start, training, 1)
                except DShuffleError as error:  # the current session goes on, unless its workers have changed meanwhile
                    self._close_following()
                    self._keep(epoch, "shares", error, self.current.session_id)
            if self._following is None:
                exchange = self._advance(self.current, epoch)
                return exchange if training is None else dataclasses.replace(exchange, training_before=training)
        except WorkerLost as error:
            if not self.elastic:
                raise
            logger.warning("dshuffle: the workers that are left train on epoch %d (%s)", epoch, what_happened(error))
        return self._take_over(start, training or self.training(epoch))

    def is_lost(self) -> bool:
        """Whether the present session is elastic, and has ended because workers were lost."""
        try:
            if self.elastic:
                self.current.ask(MemberChanges, "membership")
        except DShuffleError as error:
            return isinstance(error, WorkerLost)
        return False

    def reopen(self, start: Remainder) -> EpochExchange:
        """Open an epoch again with the workers that are left, after the session has been lost in it."""
        self._close_following()
        logger.warning("dshuffle: epoch %d begins again, because tasks of it were lost with their workers", start.epoch)
        return self._take_over(start, self.training(start.epoch))

    def close(self) -> None:
        """Close all sessions."""
        try:
            self._close_following()
        finally:
            self.current.close()

    def close_soon(self) -> None:
        """Close all sessions without waiting."""
        for session in (self._following, self.current):
            if session is not None:
                session.close_soon()

    def _close_following(self) -> None:
        following, self._following, self._only_shares = self._following, None, False
        if following is not None:
            following.close()

    def _advance(self, session: OpenSession, epoch: int) -> EpochExchange:
        exchange = session.ask(EpochExchange, "advance", epoch=epoch)
        self._exchanging, session.addresses = False, exchange.addresses
        return exchange

    def _prepare(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        """Open the session that follows, if the workers or the shares of the next epoch are others."""
        if self._following is None and self.elastic:
            self._open_with_other_workers(epoch)
        if self._following is None and not self._exchanging and self.current.session_id not in self._refused:
            self._open_with_other_shares(epoch, records)

    def _open_with_other_workers(self, epoch: int) -> None:
        current = self.current
        members = current.ask(MemberChanges, "membership")
        changed = members.leaving or (members.joined and not self._exchanging)
        if changed and members.n_available >= current.request.options.min_workers and members not in self._refused:
            try:
                self._following = current.successor(self._start_of(epoch))
            except DShuffleError as error:
                return self._keep(epoch, "workers", error, members)
            before, now = set(current.ranks), set(self._following.ranks)
            text = "dshuffle: epoch %d is trained on by %d workers (%d new) instead of %d"
            logger.warning(text, epoch, len(now), len(now - before), len(before))

    def _open_with_other_shares(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        try:
            if (weights := proposed_weights(self.current, records)) is not None:
                self._following, self._only_shares = self.current.successor(self._start_of(epoch), weights), True
        except DShuffleError as error:
            self._keep(epoch, "shares", error, self.current.session_id)

    def _keep(self, epoch: int, what: str, error: DShuffleError, refused: MemberChanges | str) -> None:
        """Log that an epoch keeps its workers or shares, because no session could be opened with others."""
        if not error.transient:  # another attempt would fail as well
            self._refused.append(refused)
        logger.warning("dshuffle: epoch %d keeps its %s: %s", epoch, what, what_happened(error))

    def _start_of(self, epoch: int) -> Remainder:
        """Where an epoch begins that nobody has trained on in the present session."""
        start = self.current.request.start
        return start if start.epoch == epoch else Remainder(epoch, ())

    def training(self, epoch: int) -> tuple[TrainingTime, ...] | None:
        """Time of training before an epoch in the present session, which counts from 0 afterwards."""
        try:
            return self.current.ask(tuple[TrainingTime, ...], "training")
        except DShuffleError as error:  # a worker has left, so the epoch is not recorded
            logger.info("dshuffle: epoch %d could not be recorded: %s", epoch - 1, error)
        return None

    def _take_over(
        self, start: Remainder, training: tuple[TrainingTime, ...] | None, attempts: int = ATTEMPTS
    ) -> EpochExchange:
        """Let the session that follows begin an epoch, and open others if it cannot."""
        epoch = start.epoch
        for attempts_left in reversed(range(attempts)):
            try:
                following = self._following = self._following or self._open_successor(start)
                exchange = self._advance(following, epoch)
                break
            except (WorkerLost, ExchangeError) as error:
                self._close_following()
                if not attempts_left or not error.transient:
                    raise
                logger.warning("dshuffle: another session is opened for epoch %d (%s)", epoch, what_happened(error))
        former, self.current, self._following, self._only_shares = self.current, following, None, False
        former.close_soon()  # Ctrl-C here must not come between the session and the position
        return dataclasses.replace(exchange, training_before=training)

    def _open_successor(self, start: Remainder) -> OpenSession:
        request = self.current.request
        seconds, limit = request.settings.replacement_timeout, "dshuffle.replacement-timeout"
        least = request.options.min_workers
        wait_for_workers(self.current.client, least, seconds, limit=limit, choice=request.choice)
        try:
            return self.current.successor(start)
        except CacheBudgetError:  # the partitions of this session take the memory, so the dataset is read again
            self.current.close()
            return self.current.successor(start)
