"""The workers of a shuffler and their shares, which may change between epochs: one session follows another.

At the beginning of an epoch, another session opens on the workers that the cluster has now, or with other shares. While
the workers train on the epoch, it exchanges the samples of the next one: each worker reads them from the partitions of
the session before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from dshuffle.errors import (
    CacheBudgetError,
    DShuffleError,
    ExchangeError,
    MembershipChanged,
    WorkerLost,
    what_happened,
)
from dshuffle.records import EpochRecord
from dshuffle.runtime import messages
from dshuffle.runtime.client.open_session import OpenSession
from dshuffle.runtime.client.share_changes import ShareChanges
from dshuffle.runtime.client.waiting import wait_for_workers
from dshuffle.runtime.messages import EpochExchange, TrainingTime

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Sessions that are opened for an epoch before the epoch counts as failed."""


class Membership:
    """The sessions of a shuffler.

    Parameters
    ----------
    session
        The first one. If it is elastic, another one follows when workers join or leave the cluster. Otherwise that only
        happens when a worker trains on the samples of a lost one. Another one also follows when shares change.
    """

    def __init__(self, session: OpenSession) -> None:
        self.current = session
        self.workers_may_change = session.request.options.on_loss == "shrink"
        self._shares = ShareChanges()
        self._min_workers = session.request.options.min_workers
        self._following: OpenSession | None = None
        self._only_shares = False  # whether the following session has the workers of the current one
        self._exchanging = False  # whether the current session exchanges for the next epoch
        self._refused: messages.MemberChanges | None = None  # workers with which no session could be opened

    def prefetch(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        """Start the exchange for the next epoch, on the workers that will train in it.

        Parameters
        ----------
        epoch
            The next epoch.
        records
            All epochs that were recorded, in order.
        """
        if self._following is None and not self._exchanging:
            self._open_following(epoch, records)
        (self._following or self.current).calls.tell("prefetch")
        self._exchanging = self._following is None

    def advance(self, epoch: int, records: Sequence[EpochRecord]) -> EpochExchange:
        """Wait for the exchange for an epoch, let the workers swap to it, and return its measurements.

        All tasks of the epoch before must have ended. The parameters are those of :meth:`prefetch`.
        """
        if self._following is None:
            self._open_following(epoch, records)
        exchange: EpochExchange | None = None
        if self._following is None:
            with contextlib.suppress(MembershipChanged):  # it may be raised while this call waits
                exchange = self.current.calls.ask(EpochExchange, "advance", epoch=epoch)
        if exchange is None:
            exchange = self._take_over(epoch)
        self._exchanging = False
        self.current.addresses = exchange.addresses
        return exchange

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
        if self.workers_may_change:
            self._open_with_other_workers(epoch)
        if self._following is None and not self._exchanging:  # an exchange is not made twice
            self._open_with_other_shares(epoch, records)

    def _open_with_other_shares(self, epoch: int, records: Sequence[EpochRecord]) -> None:
        weights = self._shares.proposed(self.current, records)
        if weights is None:
            return
        try:
            self._following = self.current.successor(epoch, weights)
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
        follows = members.adopted or (changed and self.current.request.options.elastic)
        if not follows or members.n_available < self._min_workers or members == self._refused:
            return
        try:
            self._following = self.current.successor(epoch)
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

    def _take_over(self, epoch: int) -> EpochExchange:
        try:
            training = self.current.calls.ask(tuple[TrainingTime, ...], "training")
        except DShuffleError as error:  # a worker has left, so the epoch is not recorded
            logger.info("dshuffle: epoch %d could not be recorded: %s", epoch - 1, error)
            training = None
        for attempt in range(ATTEMPTS):
            try:
                following = self._following = self._following or self._open_successor(epoch)
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
                    with contextlib.suppress(MembershipChanged):
                        exchange = self.current.calls.ask(EpochExchange, "advance", epoch=epoch)
                        return dataclasses.replace(exchange, training_before=training)
                    continue
                if attempt == ATTEMPTS - 1 or not error.transient:
                    raise
                logger.warning("dshuffle: another session is opened for epoch %d (%s)", epoch, what_happened(error))
            else:
                break
        former, self.current, self._following, self._only_shares = self.current, following, None, False
        former.close()
        return dataclasses.replace(exchange, training_before=training)

    def _open_successor(self, epoch: int) -> OpenSession:
        client, request = self.current.calls.client, self.current.request
        patience, limit = request.settings.replacement_timeout, "dshuffle.replacement-timeout"
        wait_for_workers(client, self._min_workers, patience, limit=limit, choice=request.choice)
        try:
            return self.current.successor(epoch)
        except CacheBudgetError:  # the partitions of this session take the memory, so the dataset is read again
            self.current.close()
            return self.current.successor(epoch)
