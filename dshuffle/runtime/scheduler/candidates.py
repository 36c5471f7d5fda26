"""Workers that may take the ranks of lost ones."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable

from distributed import Scheduler, Status
from distributed.comm.addressing import get_address_host_port
from distributed.scheduler import WorkerState

from dshuffle.runtime.replies import within
from dshuffle.runtime.scheduler.member_choice import by_name
from dshuffle.runtime.server_resource import only_serves
from dshuffle.runtime.session_spec import PROTOCOL
from dshuffle.runtime.worker_choice import WorkerChoice

ANSWER_WITHIN = 3.0
"""Seconds in which a candidate, or the nanny of a lost worker, must answer."""

UNFIT_FOR = 5.0
"""Seconds for which a worker that could not take a lost rank is not asked again."""


MOST_REFUSALS = 3
"""Refused connections in a row after which a nanny is gone."""

logger = logging.getLogger(__name__)


class Candidates:
    """Workers that may take lost ranks of one session.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    members
        Addresses of the session's workers. Their names and nannies are remembered, because Dask forgets lost workers.
    choice
        The workers that the session may have.
    new_workers
        Whether the cluster starts new workers in place of lost ones.
    """

    def __init__(
        self, scheduler: Scheduler, members: Iterable[str], choice: WorkerChoice, *, new_workers: bool
    ) -> None:
        self._scheduler = scheduler
        self._choice = choice
        self._new_workers = new_workers
        self._members = {address: scheduler.workers[address] for address in members if address in scheduler.workers}
        self._refused: dict[str, float] = {}  # when workers could not take a rank
        self._retiring: dict[str, WorkerState | None] = {}  # another worker may come at the same address
        self._refusals: Counter[str] = Counter()  # of connections to nannies, in a row
        self.why_unfit = ""  # why the last worker that was looked at cannot take a rank

    def remember(self, worker: WorkerState) -> None:
        """Note that a worker has become a member."""
        self._members[worker.address] = worker

    def is_refused(self, address: str) -> bool:
        """Whether a worker retires, could not take a rank a moment ago, or never can."""
        if address in self._retiring and self._scheduler.workers.get(address) in (None, self._retiring[address]):
            return True
        return self._refused.get(address, -math.inf) > asyncio.get_running_loop().time() - UNFIT_FOR

    def retire(self, address: str) -> None:
        """Note that a worker closes."""
        self._retiring[address] = self._members.get(address)

    def refuse(self, address: str, *, for_good: bool = False) -> None:
        """Note that a worker could not take a rank, and whether it never can."""
        self._refused[address] = math.inf if for_good else asyncio.get_running_loop().time()

    async def find(self, lost: str, members: Collection[str], *, serves: bool) -> WorkerState | None:
        """A worker that runs tasks, is set up and is not a member; preferably one with the name of the lost worker.

        Only a server can be replaced by a worker that does not train, and preferably is.
        """
        candidates = [
            worker
            for worker in self._scheduler.workers.values()
            if worker.address not in members
            and not self.is_refused(worker.address)
            and worker.status == Status.running
            and self._choice.allows(worker)
            and (serves or not only_serves(worker.resources))
        ]
        name = self._members[lost].name if lost in self._members else None

        def preference(worker: WorkerState) -> tuple[bool, bool, tuple[bool, int, str, str]]:
            return worker.name != name, serves and not only_serves(worker.resources), by_name(worker)

        self.why_unfit = ""
        for worker in sorted(candidates, key=preference):
            reason = await self._why_unfit(worker.address)
            if not reason:
                return worker
            self.why_unfit = f"{worker.address} {reason}"
        return None

    async def may_come(self, lost: str) -> bool:
        """Whether a worker may still come.

        The cluster starts new ones, or one is starting or was refused, or a nanny may start the lost one again.
        """
        workers = [worker for worker in self._scheduler.workers.values() if self._choice.allows(worker)]
        if self._new_workers or any(worker.status in (Status.init, Status.starting) for worker in workers):
            return True
        present = {worker.address for worker in workers}
        if any(since < math.inf for address, since in self._refused.items() if address in present):
            return True
        stays = lost in present and self._refused.get(lost) == math.inf  # no nanny starts a worker that runs
        nanny = self._members[lost].nanny if lost in self._members and not stays else None
        if not nanny:
            return False
        # Not through Dask, which tries again for half a minute if a connection is refused.
        try:
            host, port = get_address_host_port(nanny)
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_WITHIN)
        except ConnectionRefusedError:
            self._refusals[nanny] += 1
            return self._refusals[nanny] < MOST_REFUSALS
        except (OSError, ValueError, NotImplementedError) as error:  # the nanny may be busy, or its address has no port
            logger.debug("dshuffle: the nanny at %s could not be reached: %r", nanny, error)
            return True
        writer.close()
        del self._refusals[nanny]
        return True

    async def _why_unfit(self, address: str) -> str:
        """Why a worker cannot take a rank; empty if it can."""
        try:
            reply = await within(ANSWER_WITHIN, self._scheduler.rpc(address).dshuffle_protocol())
        except OSError as error:
            return f"does not answer ({type(error).__name__}: {error})"
        if not isinstance(reply, dict):
            return "is not set up for dshuffle"
        if reply.get("protocol") != PROTOCOL:
            return f"has another version of dshuffle (protocol {reply.get('protocol')}, and not {PROTOCOL})"
        return "" if reply.get("is_set_up") else "is still being set up"
