"""A session that is open on the cluster, as the client knows it."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from typing import Any

from distributed import Client
from distributed.protocol.pickle import dumps

from dshuffle.errors import CacheBudgetError, ClusterError, WorkerLost, what_happened
from dshuffle.planning import SERVER, Remainder
from dshuffle.planning.share_sizes import LARGEST_WEIGHT, Weights
from dshuffle.runtime.client.cluster_view import cluster_info, running_workers
from dshuffle.runtime.client.session_client import SessionClient, Silence
from dshuffle.runtime.client.waiting import wait_for_workers
from dshuffle.runtime.messages import OpenedSession
from dshuffle.runtime.session_spec import PROTOCOL, EarlierWorkers, SessionRequest

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a session is opened if workers are lost meanwhile."""


class OpenSession:
    """Opens a session, and knows its workers.

    Parameters
    ----------
    client
        The Dask client, on whose scheduler the plugin is installed.
    request
        What to open.
    silence
        What earlier sessions of the same shuffler know of the scheduler.

    Raises
    ------
    CacheBudgetError
        If a worker's cache partition does not fit.
    ClusterError
        If there are no workers, or a worker cannot be set up.
    """

    def __init__(self, client: Client, request: SessionRequest, silence: Silence | None = None) -> None:
        self.calls, self.request = SessionClient(client, request.session_id, silence), request
        try:
            opened = self._open_repeatedly()
        except CacheBudgetError as error:
            if request.kept_as is None or request.former is not None:
                raise
            # Some workers read kept partitions whose room other workers of the same machine need.
            logger.debug("dshuffle: the session does not read kept partitions, because they are in the way: %s", error)
            self._renew_id(reads_kept=False)
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

    def successor(self, epoch: int, weights: Weights | None = None) -> OpenSession:
        """Open a session that goes on with an epoch, on the workers that the cluster has now.

        Its workers read their first partitions from the workers of this session.

        Parameters
        ----------
        weights
            Other weights of the shares of this session's ranks, whose workers go on alone. None if the choices say how
            large shares are.
        """
        begins = epoch == self.request.start.epoch  # nobody has trained in this session
        server = self.request.options.server if SERVER in self.addresses else None
        request = dataclasses.replace(
            self.request,
            session_id=new_id(),
            options=dataclasses.replace(self.request.options, server=server),
            start=self.request.start if begins else Remainder(epoch, ()),
            former=self.request.session_id,
            carried=self.request.carried if begins else self._carried(epoch - 1),
            weights=None if weights is None else self._weights_of(weights),
        )
        return OpenSession(self.calls.client, request, self.calls.silence)

    def _weights_of(self, weights: Weights) -> dict[str, int]:
        return dict(zip(self.ranks, weights or (LARGEST_WEIGHT,) * self.n_workers, strict=True))

    def _carried(self, epoch: int) -> EarlierWorkers:
        return EarlierWorkers(
            self.history, epoch, {address: rank for rank, address in self.addresses.items() if rank != SERVER}
        )

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
