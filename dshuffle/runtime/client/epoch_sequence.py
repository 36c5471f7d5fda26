"""Moving on from epoch to epoch, also when workers come and go or shares change."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from distributed import Client

from dshuffle.errors import (
    CacheBudgetError,
    ClusterError,
    DShuffleError,
    ExchangeError,
    PeerFailed,
    WorkerLost,
    what_happened,
)
from dshuffle.notebook import html_summary
from dshuffle.planning import Choices, Remainder
from dshuffle.planning.remainder import SampleDigest
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.runtime import messages
from dshuffle.runtime.client.checkpoint_file import CheckpointFile
from dshuffle.runtime.client.cluster_view import wait_for_workers
from dshuffle.runtime.client.epoch_tasks import EpochTasks
from dshuffle.runtime.client.open_session import EpochRecorder, OpenSession, ShareChanges
from dshuffle.runtime.client.session_client import PATIENCE, SessionClient
from dshuffle.runtime.client.session_state import SessionPosition
from dshuffle.runtime.collective import CollectiveId
from dshuffle.runtime.messages import EpochExchange, TrainedSamples, TrainingTime
from dshuffle.store import Dataset
from dshuffle.units import human_count, human_seconds

logger = logging.getLogger(__name__)


ATTEMPTS = 3
"""Sessions that are opened for an epoch before the epoch counts as failed."""


class Membership:
    """The sessions of a shuffler.

    Parameters
    ----------
    session
        The first one. If it is elastic, another one follows when workers join or leave the cluster, or are lost.
        Another one also follows when shares change.
    """

    def __init__(self, session: OpenSession) -> None:
        self.current = session
        self.elastic = session.request.options.elastic
        self._shares = ShareChanges()
        self._min_workers = session.request.options.min_workers
        self._following: OpenSession | None = None
        self._only_shares = False  # whether the following session has the workers of the current one
        self._exchanging = False  # whether the current session exchanges for the next epoch
        self._refused: messages.MemberChanges | None = None  # workers with which no session could be opened

    def prefetch(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        """Start the exchange for the next epoch, on the workers that will train in it."""
        try:
            if self._following is None and not self._exchanging:
                self._open_following(epoch, records)
            (self._following or self.current).calls.tell("prefetch")
        except WorkerLost:
            if not self.elastic:
                raise
            # Another session is opened when this one has to move on.
        else:
            self._exchanging = self._following is None

    def advance(self, epoch: int, records: Sequence[EpochRecord]) -> EpochExchange:
        """Wait for the exchange for an epoch, let the workers swap to it, and return its measurements.

        All tasks of the epoch before must have ended. The parameters are those of :meth:`prefetch`.
        """
        exchange: EpochExchange | None = None
        try:
            if self._following is None:
                self._open_following(epoch, records)
            if self._following is None:
                exchange = self.current.calls.ask(EpochExchange, "advance", epoch=epoch)
        except WorkerLost as error:
            self._say_what_follows(epoch, error)
        if exchange is None:
            exchange = self._take_over(self._start_of(epoch))
        self._exchanging = False
        self.current.addresses = exchange.addresses
        return exchange

    def is_lost(self) -> bool:
        """Whether the present session is elastic, and has ended because workers were lost."""
        if not self.elastic:
            return False
        try:
            self.current.calls.ask(messages.MemberChanges, "membership")
        except DShuffleError as error:
            return isinstance(error, WorkerLost)
        return False

    def reopen(self, start: Remainder) -> EpochExchange:
        """Open an epoch again with the workers that are left, after the session has been lost in it."""
        following, self._following, self._only_shares = self._following, None, False
        if following is not None:
            following.close()
        logger.warning("dshuffle: epoch %d begins again, because tasks of it were lost with their workers", start.epoch)
        exchange = self._take_over(start)
        self._exchanging = False
        self.current.addresses = exchange.addresses
        return exchange

    def _say_what_follows(self, epoch: int, error: WorkerLost) -> None:
        """Log that other workers go on; or raise the error, if they may not."""
        if not self.elastic:
            raise error
        logger.warning("dshuffle: the workers that are left train on epoch %d (%s)", epoch, what_happened(error))

    def close(self) -> None:
        """Close all sessions."""
        following, self._following = self._following, None
        try:
            if following is not None:
                following.close()
        finally:
            self.current.close()

    def close_soon(self) -> None:
        """Close all sessions without waiting."""
        for session in (self._following, self.current):
            if session is not None:
                session.calls.close_soon()

    def _open_following(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        if self.elastic:
            self._open_with_other_workers(epoch)
        if self._following is None and not self._exchanging:  # an exchange is not made twice
            self._open_with_other_shares(epoch, records)

    def _open_with_other_shares(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        weights = self._shares.proposed(self.current, records)
        if weights is None:
            return
        try:
            self._following = self.current.successor(self._start_of(epoch), weights)
        except DShuffleError as error:
            self._keep_shares(epoch, error)
        else:
            self._only_shares = True
            logger.info("dshuffle: the shares of epoch %d are in proportion to %s", epoch, weights or "1 for each rank")

    def _keep_shares(self, epoch: int, error: DShuffleError) -> None:
        if not error.transient:  # another attempt would fail as well
            self._shares.fix(self.current)
        logger.warning("dshuffle: epoch %d keeps its shares: %s", epoch, what_happened(error))

    def _open_with_other_workers(self, epoch: int) -> None:
        members = self.current.calls.ask(messages.MemberChanges, "membership")
        changed = members.leaving or (members.joined and not self._exchanging)  # an exchange is not made twice
        if not changed or members.n_available < self._min_workers or members == self._refused:
            return
        try:
            self._following = self.current.successor(self._start_of(epoch))
        except DShuffleError as error:
            if not error.transient:  # another attempt would fail as well
                self._refused = members
            logger.warning("dshuffle: epoch %d keeps its workers: %s", epoch, what_happened(error))
        else:
            before, now = self.current.ranks, self._following.ranks
            text = f"dshuffle: epoch {epoch} is trained on by {len(now)} worker{'s' * (len(now) != 1)}"
            text += f" instead of {len(before)}" if len(now) != len(before) else ""
            n_new = len(set(now) - set(before))
            logger.warning(text + (f", {n_new} of which {'is' if n_new == 1 else 'are'} new" if n_new else ""))

    def _start_of(self, epoch: int) -> Remainder:
        """Where an epoch begins that nobody has trained on in the present session."""
        start = self.current.request.start
        return start if start.epoch == epoch else Remainder(epoch, ())

    def _take_over(self, start: Remainder) -> EpochExchange:
        epoch = start.epoch
        try:
            training = self.current.calls.ask(tuple[TrainingTime, ...], "training")
        except DShuffleError as error:  # a worker has left, so the epoch is not recorded
            logger.info("dshuffle: epoch %d could not be recorded: %s", epoch - 1, error)
            training = None
        for attempt in range(ATTEMPTS):
            try:
                following = self._following = self._following or self._open_successor(start)
                exchange = following.calls.ask(EpochExchange, "advance", epoch=epoch)
            except DShuffleError as error:
                only_shares, self._only_shares = self._only_shares, False
                if not only_shares and not isinstance(error, (WorkerLost, ExchangeError)):
                    raise
                if self._following is not None:
                    self._following.close()
                    self._following = None
                if only_shares:  # the current session goes on, unless its workers have changed meanwhile
                    self._keep_shares(epoch, error)
                    try:
                        exchange = self.current.calls.ask(EpochExchange, "advance", epoch=epoch)
                    except WorkerLost as lost:
                        self._say_what_follows(epoch, lost)
                        continue
                    return dataclasses.replace(exchange, training_before=training)
                if attempt == ATTEMPTS - 1 or not error.transient:
                    raise
                logger.warning("dshuffle: another session is opened for epoch %d (%s)", epoch, what_happened(error))
            else:
                break
        former, self.current, self._following, self._only_shares = self.current, following, None, False
        former.calls.close_soon()  # Ctrl-C here must not come between the session and the position
        return dataclasses.replace(exchange, training_before=training)

    def _open_successor(self, start: Remainder) -> OpenSession:
        client, request = self.current.calls.client, self.current.request
        patience, limit = request.settings.replacement_timeout, "dshuffle.replacement-timeout"
        wait_for_workers(client, self._min_workers, patience, limit=limit, choice=request.choice)
        try:
            return self.current.successor(start)
        except CacheBudgetError:  # the partitions of this session take the memory, so the dataset is read again
            self.current.close()
            return self.current.successor(start)


class EpochSequence:
    """Moves the workers from epoch to epoch. It is what a :class:`dshuffle.Shuffler` holds while it is open.

    Parameters
    ----------
    client, dataset
        The Dask client, and the session's dataset.
    membership
        The session that is open, and those that follow it.
    position
        The current epoch, and the state.
    checkpoint
        Where the state is written in every epoch; None if nowhere.
    release
        Called when the sequence is closed.
    """

    def __init__(
        self,
        client: Client,
        dataset: Dataset,
        membership: Membership,
        position: SessionPosition,
        checkpoint: CheckpointFile | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.dataset = dataset
        self.membership = membership
        self.position = position
        self.checkpoint = checkpoint
        self._release = release
        self._watches = False  # whether somebody looks at the tasks
        self.recorder = EpochRecorder(dataset, self.choices)
        self.closed = False
        self._handed_out = True  # whether the current epoch has been yielded
        self._collectives = itertools.count(1)

    def __repr__(self) -> str:
        balance = "" if self.choices.balance is None else f", balance={self.choices.balance.name!r}"
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        state = "closed " if self.closed else ""
        return f"<{state}Shuffler {self.choices.label}{balance} of {hide_secrets(self.dataset.url)}; {figures}>"

    def _repr_html_(self) -> str:
        state = "Closed shuffler" if self.closed else "Shuffler"
        facts = {name: value for name, value in self.choices.to_dict().items() if value is not None} | self._figures()
        headings = ("epoch", "samples received", "bytes sent", "exchange", "training", "waited")
        records = self.recorder.records[-5:]
        rows = [[record._figures().get(name, record.epoch) for name in headings] for record in records]
        return html_summary(f"{state} of {hide_secrets(self.dataset.url)}", facts, headings if rows else (), rows)

    def _figures(self) -> dict[str, object]:
        """What a person wants to see first."""
        figures: dict[str, object] = {
            "workers": self.membership.current.n_workers,
            "samples": human_count(self.dataset.n_samples),
        }
        if self.epoch is not None:
            figures["epoch"] = self.epoch
        if self.recorder.records:
            figures["last exchange"] = human_seconds(self.recorder.records[-1].exchange_seconds)
        return figures

    @property
    def calls(self) -> SessionClient:
        """Calls of the session that trains."""
        return self.membership.current.calls

    @property
    def choices(self) -> Choices:
        """The way of shuffling."""
        return self.membership.current.request.choices

    @property
    def epoch(self) -> int | None:
        """Number of the current epoch; None before the first one."""
        return None if self.position.tasks is None else self.position.tasks.epoch

    # -- from epoch to epoch -----------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[EpochTasks]:
        """Move on ``count`` times, and yield the tasks of each epoch, which are to be filled."""
        if self.closed:
            raise ClusterError("this Shuffler is closed. Make a new one", transient=False)
        self.calls.check_process()
        return self._epochs(count)

    def _epochs(self, count: int) -> Iterator[EpochTasks]:
        position, left = self.position, count
        while True:
            is_again = False
            if self._handed_out or not left:
                is_again = self._is_reopened(self._end_tasks if left else self._finish_epoch)
                if not (left or is_again):
                    break
                if not is_again:
                    self._move_on()
            left -= not is_again
            assert position.tasks is not None
            if left:
                self.membership.prefetch(position.next_epoch, self.recorder.records)
            self.write_checkpoint()
            self._handed_out = True  # not before: Ctrl-C in a call must not lose the epoch
            yield position.tasks
        if position.tasks is not None and position.tasks.begun:
            position.ended = True
        # else the epoch is still to be trained on: ``epoch = list(shuffler.epochs(1))[0]``
        self.write_checkpoint()

    def _is_reopened(self, end: Callable[[], None]) -> bool:
        """Let the tasks end; whether the epoch is opened again, because some were lost, and others can go on."""
        position, tasks = self.position, self.position.tasks
        try:
            end()
            if tasks is None or not (tasks.interrupted and self.membership.is_lost()):
                return False
        except (WorkerLost, PeerFailed):
            if tasks is None or not self.membership.is_lost():
                raise
        start, requested_at = position.left(), time.perf_counter()
        if start.epoch > tasks.epoch:  # all samples were trained on, according to the last state
            tasks.clear()
            return False
        exchange = self.membership.reopen(start)
        position.reopen(start)
        self._begin(exchange, requested_at)
        return True

    def _move_on(self) -> None:
        position, requested_at = self.position, time.perf_counter()
        position.ended = True
        exchange = self.membership.advance(position.next_epoch, self.recorder.records)
        position.next_epoch += 1
        self._begin(exchange, requested_at)

    def _begin(self, exchange: EpochExchange, requested_at: float) -> None:
        self.position.begin(EpochTasks(exchange.epoch))
        self._handed_out = False  # at once: Ctrl-C must not skip the epoch
        self.recorder.end(exchange.training_before, requested_at)
        self.recorder.begin(exchange, self.membership.current, requested_at)

    def _finish_epoch(self) -> None:
        try:
            self._end_tasks()
        finally:
            ended = time.perf_counter()
            if self.recorder.pending:
                try:
                    training = self.calls.ask(tuple[TrainingTime, ...], "training")
                except DShuffleError as error:
                    # The session has ended, and says so itself.
                    logger.info("dshuffle: epoch %d could not be recorded: %s", self.epoch, error)
                    self.recorder.end(None, ended)
                else:
                    self.recorder.end(training, ended)

    def _end_tasks(self) -> None:
        if self.position.tasks is not None:
            self.calls.check_process()
            self.position.tasks.end(self.calls)

    # -- in an epoch -------------------------------------------------------------------------------------------

    def check_current(self, tasks: EpochTasks) -> None:
        """Refuse new tasks of an epoch that is not the current one."""
        if self.closed or tasks is not self.position.tasks:
            now = "closed" if self.closed else f"on epoch {self.epoch}"
            raise ClusterError(f"epoch {tasks.epoch} has ended; its shuffler is {now}", transient=False)
        self.calls.check_process()

    def watch_tasks(self) -> None:
        """From now on, say what tasks wait for, also while the user waits for them in calls of Dask."""
        if not self._watches:
            self._watches = True
            loop: Any = self.client.loop
            loop.add_callback(_watch, weakref.ref(self))

    def new_collective(self) -> CollectiveId:
        """Number and place of a call of :meth:`dshuffle.Epoch.together`."""
        current = self.membership.current
        return CollectiveId(self.calls.session_id, next(self._collectives), current.n_workers, current.ranks[0])

    def attach(self, value: Any, epoch: int | None) -> None:
        """Keep a value with the state. After the last epoch, the checkpoint has it at once."""
        self.position.attach(value, epoch)
        if self.position.ended and not self.closed:
            self.write_checkpoint()

    # -- the state ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state, with how far the tasks of the current epoch say they are."""
        if self.closed:
            raise ClusterError("this Shuffler is closed. Take its state before", transient=False)
        counts: tuple[int, ...] = ()
        digest = SampleDigest()
        if self.epoch is not None and not self.position.ended:
            try:
                trained = self.calls.ask(TrainedSamples, "trained")
            except WorkerLost:
                if self.position.tasks is not None:  # calls that the loop has not made yet are missing
                    self.position.tasks.interrupted = True
                raise
            if trained.epoch == self.epoch:
                counts, digest = trained.counts, trained.digest
        return self.position.state(counts, digest)

    def write_checkpoint(self) -> None:
        """Write the state to the checkpoint, if there is one."""
        # Nothing was trained on since the last epoch began or ended, so no worker is asked.
        if self.checkpoint is not None:
            self.checkpoint.write(self.position.state())

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the current epoch, close the sessions, and leave the checkpoint to others."""
        if self.closed:
            return
        self.calls.check_process()
        self.calls.silence.leaving = True
        try:
            tasks = self.position.tasks
            if tasks is not None and tasks.error is None:  # else it was raised before
                self._finish_epoch()
        finally:
            self.closed = True
            try:
                self.membership.close()
            finally:
                self._release()
                if self.checkpoint is not None:
                    self.checkpoint.release()

    def close_and_log(self) -> None:
        """Close, and say only in the log if tasks of the current epoch did not finish."""
        try:
            self.close()
        except Exception as error:
            tasks = self.position.tasks
            if tasks is None or tasks.error is not error:
                raise
            notes = "; ".join(getattr(error, "__notes__", []))
            logger.warning("dshuffle: %s: %s (%s)", type(error).__name__, error, notes)

    def close_after(self, error: BaseException) -> None:
        """Close after an error or Ctrl-C, without waiting for the tasks of this epoch, and without another error."""
        if self.calls.forked:
            return  # the session belongs to another process, and this error is more important
        if (tasks := self.position.tasks) is not None:
            if self.calls.connected:
                self.client.cancel(tasks.futures)
            tasks.clear()
        try:
            self.close()
        except DShuffleError as second:
            logger.warning("dshuffle: after %s, closing failed: %s", type(error).__name__, second)

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self.calls.connected:
            self.closed = True
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self.membership.close_soon()
            self._release()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it owns an open session, and the connections of a Dask client in "
            "this process. Pass the object itself to other functions. In another process, make a new one, or use "
            "Epoch.map to run functions on the workers"
        )


async def _watch(watched: weakref.ref[EpochSequence]) -> None:
    """Say what the tasks of a sequence wait for after some seconds, then after twice that time, and so on."""
    said_after = 0.0
    while (sequence := watched()) is not None and not sequence.closed and sequence.calls.connected:
        calls, tasks = sequence.calls, sequence.position.tasks
        seconds = 0.0 if tasks is None else tasks.waiting_seconds
        del sequence, tasks
        if seconds < PATIENCE:
            said_after = 0.0
        elif seconds >= 2 * said_after:
            said_after = seconds
            await calls.say_what_for(tasks=True)
        await asyncio.sleep(PATIENCE / 3)
