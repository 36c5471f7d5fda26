"""A session that is open, the records of its epochs, and when its shares change."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from distributed import Client
from distributed.protocol.pickle import dumps

from dshuffle.errors import CacheBudgetError, ClusterError, WorkerLost, what_happened
from dshuffle.planning import SERVER, Choices, GivenSharding, Remainder
from dshuffle.planning.exchange_epochs import LARGEST_WEIGHT, Weights
from dshuffle.planning.shares import ShareBounds
from dshuffle.records import EpochRecord
from dshuffle.runtime.client.cluster_view import cluster_info, running_workers, wait_for_workers
from dshuffle.runtime.client.session_client import SessionClient, Silence
from dshuffle.runtime.messages import EpochExchange, OpenedSession, TrainingTime
from dshuffle.runtime.session_spec import PROTOCOL, EarlierWorkers, SessionRequest
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


ATTEMPTS = 3
"""How often a session is opened if workers are lost meanwhile."""


class OpenSession:
    """Opens a session, and knows its workers.

    Parameters
    ----------
    client
        The Dask client, on whose scheduler the plugin is installed.
    silence
        What earlier sessions of the same shuffler know of the scheduler.
    """

    def __init__(self, client: Client, request: SessionRequest, silence: Silence | None = None) -> None:
        self.calls, self.request = SessionClient(client, request.session_id, silence), request
        try:
            opened = self._open_repeatedly()
        except CacheBudgetError as error:
            # Workers have freed the partitions that were to be read (transient), or some workers read kept partitions
            # whose room other workers of the same machine need.
            if not error.transient and (request.kept_as is None or request.former is not None):
                raise
            logger.debug("dshuffle: the session reads the dataset, because other partitions are in the way: %s", error)
            self._renew_id(reads_kept=error.transient)
            opened = self._open_repeatedly()
        if opened.left_out:
            logger.warning("dshuffle: these workers are paused and do not take part: %s", ", ".join(opened.left_out))
        if opened.too_few_files:
            logger.warning("dshuffle: %s", opened.too_few_files)
        self.addresses, self.history, self._server_role = opened.addresses, opened.history, opened.server
        self.n_workers = self.history.n_workers

    def _open_repeatedly(self) -> OpenedSession:
        client, options, choice = self.calls.client, self.request.options, self.request.choice
        # All workers may be paused at this moment.
        n_workers = options.min_workers if options.elastic else max(1, running_workers(cluster_info(client), choice))
        for _ in range(ATTEMPTS - 1):
            try:
                return self._open()
            except WorkerLost as error:
                # A session that follows another one is opened again by its Membership.
                if self.request.former is not None or options.on_loss == "raise":
                    raise
                logger.warning("dshuffle: the session is opened again: %s", what_happened(error))
            self._renew_id()
            patience = self.request.settings.replacement_timeout
            try:
                wait_for_workers(client, n_workers, patience, limit="dshuffle.replacement-timeout", choice=choice)
            except ClusterError as error:
                if running_workers(cluster_info(client), choice) < options.min_workers:
                    raise
                logger.warning("dshuffle: the session opens with fewer workers: %s", what_happened(error))
        return self._open()

    def _renew_id(self, **changes: Any) -> None:
        # The scheduler has closed the session with the old id.
        self.request = dataclasses.replace(self.request, session_id=new_id(), **changes)
        self.calls = SessionClient(self.calls.client, self.request.session_id, self.calls.silence)

    def _open(self) -> OpenedSession:
        try:
            return self.calls.ask(OpenedSession, "open", protocol=PROTOCOL, order=dumps(self.request))
        except BaseException:  # the scheduler does not notice Ctrl-C or a lost answer, and would keep the session
            self.calls.close_soon()
            raise

    @property
    def server(self) -> str:
        """Role of the server, which may have been lost."""
        return self._server_role if SERVER in self.addresses else ""

    @property
    def ranks(self) -> tuple[str, ...]:
        """Addresses of the workers that train, in rank order."""
        return tuple(self.addresses[rank] for rank in range(self.n_workers))

    def look_up_members(self) -> bool:
        """Ask the scheduler for the addresses; whether ranks have other workers than at the last look."""
        before, self.addresses = self.addresses, self.calls.ask(dict[int, str], "members")
        return before != self.addresses

    def successor(self, start: Remainder, weights: Weights | None = None) -> OpenSession:
        """Open a session that goes on with what is left of an epoch, on the workers that the cluster has now.

        Its workers read their first partitions from the workers of this session.
        """
        begins = start == self.request.start  # what is left is left by an earlier session
        places = {address: rank for rank, address in self.addresses.items() if rank != SERVER}
        carried = EarlierWorkers(self.history, start.epoch if start.trained else start.epoch - 1, places)
        server = self.request.options.server if SERVER in self.addresses else None
        request = dataclasses.replace(
            self.request,
            session_id=new_id(),
            options=dataclasses.replace(self.request.options, server=server),
            start=start,
            former=self.request.session_id,
            carried=self.request.carried if begins else carried,
            weights=None if weights is None else self._weights_of(weights),
        )
        return OpenSession(self.calls.client, request, self.calls.silence)

    def _weights_of(self, weights: Weights) -> dict[str, int]:
        return dict(zip(self.ranks, weights or (LARGEST_WEIGHT,) * self.n_workers, strict=True))

    def close(self) -> None:
        """Free the partitions on all workers. A scheduler that does not answer is no error: no result is lost."""
        if self.calls.connected:
            try:
                self.calls.tell("close")
            except ClusterError as error:
                if not self.calls.silence.seconds:
                    raise
                self.calls.close_soon()  # a scheduler that is only slow closes it later
                logger.warning("dshuffle: the session may stay open until this client leaves: %s", error)


def new_id() -> str:
    """Return an id for a session."""
    return uuid.uuid4().hex[:12]


class EpochRecords(list[EpochRecord]):
    """Records of the epochs that have ended."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        """A record, or a list of some."""
        try:
            return super().__getitem__(place)
        except IndexError:
            ended = {0: "no epoch has", 1: "only one epoch has"}.get(len(self), f"only {len(self)} epochs have")
            message = f"{ended} ended, and there is no record {place}. An epoch is recorded when the next one begins"
            raise IndexError(f"{message}, or the loop ends") from None


class EpochRecorder:
    """Collects the record of each epoch: its exchange is measured when it begins, its training when it ends.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    """

    def __init__(self, dataset: Dataset, choices: Choices) -> None:
        self.records = EpochRecords()
        self._dataset = dataset
        self._choices = choices
        self._exchange: EpochExchange | None = None
        self._session: dict[str, Any] = {}
        self._requested_at = time.perf_counter()

    @property
    def pending(self) -> bool:
        """Whether an epoch has begun that is not recorded yet."""
        return self._exchange is not None

    def begin(self, exchange: EpochExchange, session: OpenSession, requested_at: float) -> None:
        """Note what was measured of the exchange of an epoch that begins, and the session that trains in it.

        ``requested_at`` is when the client asked for the epoch, by ``time.perf_counter()``.
        """
        self._requested_at = requested_at
        start = session.request.start
        self._exchange = exchange
        self._session = {
            "trained_before": start.total if start.epoch == exchange.epoch else 0,
            "n_workers": session.n_workers,
            "server": session.server,
            "first_epoch": start.epoch,
            "weights": session.history.weights,
        }

    def end(self, training: tuple[TrainingTime, ...] | None, ended: float) -> None:
        """Append the record of the current epoch, if it is not recorded yet."""
        exchange, self._exchange = self._exchange, None
        if exchange is None or training is None:
            return
        choices = dataclasses.replace(self._choices, delivery=exchange.delivery)
        sharding = choices.sharding
        self.records.append(
            EpochRecord(
                choices=choices.by_name(),
                broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
                n_samples=self._dataset.n_samples,
                row_nbytes=self._dataset.row_nbytes,
                training_seconds=max(rank.seconds for rank in training),
                rank_training_seconds=tuple(rank.own for rank in training),
                epoch=exchange.epoch,
                run_id=exchange.run_id,
                needed=exchange.needed,
                packets=exchange.packets,
                components=exchange.components,
                exchange_seconds=exchange.exchange_seconds,
                waited_seconds=exchange.waited_seconds,
                epoch_seconds=ended - self._requested_at,
                **exchange.measures.to_dict(),
                **self._session,
            )
        )


class ShareChanges:
    """Proposes other shares for the ranks of a session, as its policy says."""

    def __init__(self) -> None:
        self._fixed: str | None = None  # id of the session whose shares cannot change

    def proposed(self, session: OpenSession, records: Sequence[EpochRecord]) -> Weights | None:
        """Other weights for the ranks of a session; None if they stay."""
        if session.request.session_id == self._fixed:
            return None
        choices, start = session.request.choices, session.request.start.epoch
        epochs = [record.rank_training_seconds for record in records if record.first_epoch == start]
        n_samples, n_workers = session.request.dataset.n_samples, session.n_workers
        bounds = ShareBounds.of(choices.assignment, choices.cache_fraction, n_samples, n_workers)
        now = session.history.weights
        weights = choices.shares.following(now, epochs, bounds)
        return None if weights == now else weights

    def fix(self, session: OpenSession) -> None:
        """Let the shares of a session stay.

        Measured weights differ a little in every epoch, so others would fail like those that have failed.
        """
        self._fixed = session.request.session_id
