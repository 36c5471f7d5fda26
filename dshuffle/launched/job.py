"""The job as rank 0's scheduler knows it: which ranks are there, where they meet, and whether one has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dshuffle.errors import DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.launched.launcher import Place
from dshuffle.launched.ports import HELLO, Terms, job_key
from dshuffle.runtime.messages import Arrays, replying

MEET, WATCH, FAILED = "dshuffle_meet", "dshuffle_watch", "dshuffle_rank_failed"
"""Requests of a rank to rank 0's scheduler, beside the first one."""


class Step(NamedTuple):
    """What the loop of a rank does next, and how many batches of its last epoch it had. All ranks do the same."""

    does: str
    epoch: int = -1
    n_batches: int = 0
    n_all: int = 0

    def __str__(self) -> str:
        if self.epoch < 0:
            return self.does
        return f"{self.does} after {self.n_batches} of {self.n_all} batches of epoch {self.epoch}"


def apart(rank: int, step: Step, does: str) -> PeerFailed:
    """The error of loops that do not go through the same batches."""
    return PeerFailed(
        f"rank {rank} {step}, and {does}. All ranks must go through the same epochs, and leave them at the same batch",
        transient=False,
    )


class Job(SchedulerPlugin):
    """The ranks of a job. All of it runs on the event loop of rank 0's scheduler.

    Before each step, the ranks meet: rank 0 is told when all of them have come to the same one, and the others get what
    rank 0 answers then.
    """

    name = "dshuffle-job"

    def __init__(self, scheduler: Scheduler, place: Place, ports: Sequence[int], terms: Terms) -> None:
        self.scheduler, self.world_size = scheduler, place.world_size
        self.failure: DShuffleError | None = None
        self.ended = False
        self.empty = asyncio.Event()
        """Set when the workers of all ranks have gone."""
        self._key, self._terms = job_key(place, ports), dict(terms)
        self._ranks: dict[str, int] = {}  # by address of the worker
        self._early = 0, Step("")  # the rank that was the first one to leave an epoch early
        self._news = asyncio.Event()
        self._meet_again()
        requests: dict[str, Callable[..., Any]] = {
            HELLO: self._hello,
            MEET: self._meet,
            WATCH: self._watch,
            FAILED: self.rank_failed,
        }
        scheduler.handlers |= {name: replying(name, method) for name, method in requests.items()}
        scheduler.add_plugin(self, name=self.name)

    def _meet_again(self) -> None:
        self._steps: dict[int, Step] = {}  # of the ranks that have come
        self._all_came = asyncio.Event()
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def absent(self) -> list[int]:
        """Ranks for which the others wait."""
        return sorted(set(range(self.world_size)) - self._steps.keys())

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A rank has come."""
        self._ranks[worker] = int(str(scheduler.workers[worker].name))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """A rank has gone."""
        rank = self._ranks.pop(worker, None)
        host = worker.partition("://")[2].rpartition(":")[0]
        if rank is not None:
            self.fail(WorkerLost(f"rank {rank} of {self.world_size} was lost: its process on {host} has ended"))
        if not self._ranks:
            self.empty.set()

    def answer(self, answer: Any) -> None:
        """Let the ranks go on that have met, with what rank 0 tells them."""
        if self.failure is None:
            self._answer.set_result(answer)
            self._meet_again()

    def rank_failed(self, rank: int, reason: str) -> None:
        """A rank has failed."""
        self.fail(PeerFailed(f"rank {rank} of {self.world_size} has failed: {reason}"))

    def fail(self, failure: DShuffleError) -> None:
        """Let all ranks fail. Only the first reason counts."""
        if self.failure is None and not self.ended:
            self.failure = failure
            self._all_came.set()
            self._answer.set_result(None)
            self._news.set()

    def check(self) -> None:
        """Raise an error if the job has failed."""
        if self.failure is not None:
            raise self.failure

    def _hello(self, key: str, rank: int, world_size: int, terms: Terms) -> bool:
        """Say whether this is the scheduler of a job."""
        if key != self._key or self.ended:
            return False
        if world_size != self.world_size:
            raise InvalidParameter.of("world_size", world_size, f"{self.world_size}, as on rank 0")
        if rank in self._ranks.values():
            hint = "Two processes have the same rank, or two jobs the same port."
            raise InvalidParameter.of("rank", rank, "another one on each process of the job", hint)
        for name, (own, shown) in self._terms.items():
            other, other_shown = terms.get(name, ("", "none"))
            if other != own:
                differs = f"rank {rank} has {name}={other_shown}, and rank 0 has {shown}"
                error = InvalidParameter(f"{differs}. Call dshuffle.spmd alike on all ranks")
                self.rank_failed(rank, str(error))
                raise error
        return True

    async def _meet(self, rank: int, step: Sequence[Any]) -> Arrays:
        self.check()
        own, all_came, answer = Step(*step), self._all_came, self._answer
        for other, its in self._steps.items():
            if its != own:
                self.fail(apart(other, its, f"rank {rank} {own}"))
        self._steps[rank] = own
        if own.n_batches < own.n_all and own.epoch > self._early[1].epoch:
            self._early = rank, own
            self._news.set()
        if not self.absent:
            all_came.set()
        await (asyncio.shield(answer) if rank else all_came.wait())
        self.check()
        return Arrays(answer=answer.result() if rank else None)

    async def _watch(self, rank: int, seen: int) -> Arrays:
        """Wait until a rank has left a later epoch early, or the job fails."""
        while self.failure is None and self._early[1].epoch <= seen:
            self._news.clear()
            await self._news.wait()
        self.check()
        early, step = self._early
        return Arrays(early=early, step=list(step))
