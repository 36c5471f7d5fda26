"""What a client does in a session, and what must hold for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Future
from distributed.scheduler import KilledWorker
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, ExchangeError, WorkerLost
from dshuffle.planning import WorkerHistory
from dshuffle.runtime import Shuffler
from dshuffle.runtime.client.checkpoints import SessionState
from dshuffle.runtime.client.epoch import Epoch
from dshuffle.runtime.partition import Partition

from .datasets import N_SAMPLES
from .schedule import BUILD, MISTAKES, WAYS, Workload

if TYPE_CHECKING:
    from .simulation import World
    from .worker import SimulatedGroup, SimulatedWorker

MOST_LOSSES = 20
"""How often an epoch may begin again."""

ATTEMPTS = 10
"""How often a client asks for an epoch whose exchange fails."""


HARMLESS = {"corrupt", "store away", *MISTAKES}
"""Faults that do not lose workers."""


UNEXPECTED = re.compile(r"\b(Assertion|Attribute|Index|Key|Name|Runtime|Type|Value)Error: ")
"""Errors of programs, in the texts of other errors."""


class Mistake(Exception):
    """An error of a user's function."""


TASK_ERRORS = (Mistake, DShuffleError, CancelledError, KilledWorker)
"""What a task may end with."""


@dataclass
class Call:
    """One call of an epoch, and what its tasks have done.

    Parameters
    ----------
    kind
        ``"map"``, ``"nested"`` or ``"together"``.
    mistaken
        Ranks whose tasks raise an error.
    mark
        Samples that each task says it has trained on; None to say nothing.
    ids
        What each rank has trained on, in all calls of the epoch.
    futures
        Its futures.
    trained
        Ranks whose function has returned.
    whole
        Whether no earlier session has trained on a part of the epoch.
    excused
        Whether the client has cancelled tasks.
    fetched, results
        Whether the client has all results, and the results.
    """

    kind: str
    mistaken: frozenset[int] = frozenset()
    mark: int | None = None
    ids: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    futures: list[Future] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    whole: bool = True
    excused: bool = False
    fetched: bool = False
    results: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """What each rank trained on in an epoch, and the workers until then."""

    history: WorkerHistory
    samples: dict[int, list[int]]


class Script:
    """A session of a client.

    Parameters
    ----------
    world
        Where it runs.
    workload
        What it does.
    """

    def __init__(self, world: World, workload: Workload) -> None:
        self.world, self.workload, self.rng = world, workload, world.rng
        way, on_loss = WAYS[world.schedule.way], workload.on_loss
        self.options: dict[str, Any] = {"elastic": True} if on_loss == "elastic" else {"on_loss": on_loss}
        self.options |= {**way, "seed": 7, "server": "0" if world.schedule.dedicated else None}
        self.epoch: Epoch | None = None
        self.ranks = range(0)
        self.history: WorkerHistory | None = None
        self.calls: list[Call] = []  # of the present epoch
        self.ids: dict[int, NDArray[np.int64]] = {}  # what each rank has trained on in the present epoch
        self.before: list[NDArray[np.int64]] = []  # what an earlier session has trained on in it
        self.epochs: Iterator[Epoch] | None = None
        self.trained: dict[int, Trained] = {}
        self.resumed = False
        self.shuffler: Shuffler | None = None

    def run(self) -> Iterator[None]:
        """Train. The other session goes on at each ``yield``."""
        try:
            shuffler = self._open()
            while shuffler is not None:
                self.shuffler = shuffler
                try:
                    state = yield from self._train(shuffler)
                except AssertionError:
                    raise
                except Exception as error:
                    shuffler.__exit__(type(error), error, error.__traceback__)
                    raise
                shuffler.close()
                shuffler = None if state is None else self._resume(state)
        except WorkerLost as error:
            self.world.seen["WorkerLost"] += 1
            if not self.world.schedule.faults - HARMLESS:
                raise AssertionError("a worker was lost for no reason") from error

    def abandon(self) -> None:
        """Let nobody close the session: something is wrong, and the world ends."""
        if self.shuffler is not None:
            self.shuffler.closed = True

    def _open(self) -> Shuffler | None:
        try:
            shuffler = Shuffler(self.world.client, self.world.dataset, **self.options)
        except DShuffleError as error:
            self.world.needs_faults(error)
            self.world.seen[f"not opened: {type(error).__name__}"] += 1
            return None
        self.world.begin()
        return shuffler

    def _train(self, shuffler: Shuffler) -> Generator[None, None, dict[str, Any] | None]:
        """Train on all epochs; what another session resumes, if the session ends before."""
        self.epoch = self.epochs = None
        number, tried = shuffler.next_epoch, 0
        while True:
            epoch = self._next_epoch(shuffler, number)
            if epoch is None:
                return None
            tried = tried + 1 if epoch.number < number else 0
            assert tried < MOST_LOSSES, "an epoch begins again and again"
            number = epoch.number + 1
            yield
            if epoch.number == self.workload.resumes and not self.resumed:
                state = self._stop_in_the_middle(shuffler, epoch)
                if state is not None:
                    return state
            for kind in self.workload.calls:
                call = self._call(epoch, kind)
                yield
                if "cancel" in self.world.schedule.faults and call.futures and self.rng.random() < 0.3:
                    self.world.seen["cancel"] += 1
                    call.excused = True
                    self.world.client.cancel(self.rng.sample(call.futures, self.rng.randint(1, len(call.futures))))
                if not self.workload.late:
                    self._fetch(call)
                yield
            for call in self.calls if self.workload.late else []:
                self._fetch(call)

    # -- epochs ----------------------------------------------------------------------------------------------------

    def _next_epoch(self, shuffler: Shuffler, number: int) -> Epoch | None:
        """The epoch with a number, or the one before once more if workers were lost in it; None after the last one."""
        left = self.world.schedule.epochs - number
        for _ in range(ATTEMPTS):
            if self.epochs is None:
                self.epochs = shuffler.epochs(left if self.workload.ahead else min(left, 1))
            try:
                epoch = next(self.epochs, None)
                if epoch is None and left:  # the epoch before has ended
                    self.epochs = shuffler.epochs(1)
                    epoch = next(self.epochs)
            except (*TASK_ERRORS, OSError) as error:
                self._refused(error)
                continue
            if epoch is None:
                assert not left
                self._moved_on()
                return None
            if self.epoch is not None and epoch.number == self.epoch.number:
                self._begins_again()
            else:
                assert epoch.number == number, f"epoch {epoch.number} comes in place of {number}"
                self._moved_on()
            self.epoch, self.ranks = epoch, range(shuffler.n_workers)
            self.history = shuffler._membership.current.history
            return epoch
        raise WorkerLost("the client gave up")

    def _begins_again(self) -> None:
        """Workers were lost in an epoch of an elastic session: what tasks have done in it does not count."""
        self.world.seen["again"] += 1
        assert self.workload.on_loss == "elastic"
        assert self.world.schedule.faults - HARMLESS, "an epoch begins again for no reason"
        self.calls, self.ids = [], {}

    def _refused(self, error: BaseException) -> None:
        """The epoch does not end, or the next one does not begin: try again."""
        check_meant(error)
        self.epochs = None
        self.world.seen[f"refused: {type(error).__name__}"] += 1
        if isinstance(error, WorkerLost):
            raise error
        # A session with other workers opens, perhaps while the store is away.
        is_away = isinstance(error, DatasetError) and "store away" in self.world.schedule.faults
        if isinstance(error, ExchangeError) or is_away:
            self.world.needs_faults(error)
            self.world.pass_time(5)
            return
        missing = any(set(self.ranks) - call.trained or call.excused for call in self.calls)
        if not missing and not self.world.schedule.faults - HARMLESS:
            raise AssertionError("the epoch did not end, although all of its tasks have") from error
        if self.epoch is not None:
            self.epoch.accept()
            self._forget()

    def _moved_on(self) -> None:
        """The epoch has ended without an error: all tasks must have run, and each sample was trained on once."""
        for call in self.calls:
            lost = sorted(set(self.ranks) - call.trained)
            assert not lost, f"ranks {lost} have not trained, and nobody says so"
        if self.calls and self.epoch is not None and self.history is not None:
            ids = np.concatenate([*self.before, *self.ids.values()])
            assert sorted(ids.tolist()) == list(range(N_SAMPLES)), "samples were lost or doubled"
            if not self.before:
                samples = {rank: ids.tolist() for rank, ids in self.ids.items()}
                self.trained[self.epoch.number] = Trained(self.history, samples)
            self.world.seen["epochs"] += 1
        if self.epoch is not None:
            self._forget()

    def _forget(self) -> None:
        self.calls, self.ids, self.before = [], {}, []

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, epoch: Epoch, kind: str, mark: int | None = None) -> Call:
        mistaken: set[int] = set()
        if "mistake" in self.world.schedule.faults and mark is None and self.rng.random() < 0.2:
            self.world.seen["mistake"] += 1
            mistaken = set(self.rng.sample(self.ranks, self.rng.randint(1, len(self.ranks))))
        call = Call(kind, frozenset(mistaken), mark, self.ids, whole=not self.before)
        self.calls.append(call)
        if kind != "together":
            call.futures = epoch.map(self.train, call)
            return call
        try:
            epoch.together(self.train, call)
        except (*TASK_ERRORS, OSError) as error:
            self._failed(call, error)
        else:
            call.fetched = True
        return call

    def _fetch(self, call: Call) -> None:
        """Do with the futures what the workload says."""
        client, fetches = self.world.client, self.workload.fetches if call.mark is None else "results"
        if not call.futures or fetches == "never":
            return
        try:
            match fetches:
                case "results":
                    call.results = client.gather(call.futures)
                    call.fetched = True
                    for rank, ids in enumerate(call.results):
                        self._assert_same(ids, self.ids[rank])
                case "skip":
                    client.gather(call.futures, errors="skip")
                case "exception":
                    for future in call.futures:
                        future.exception()
        except (*TASK_ERRORS, OSError) as error:
            self._failed(call, error)

    def _failed(self, call: Call, error: BaseException) -> None:
        check_meant(error)
        self.world.seen[f"a task: {type(error).__name__}"] += 1
        if not call.mistaken and not call.excused and not self.world.schedule.faults - HARMLESS:
            raise AssertionError("a task has failed for no reason") from error

    async def train(
        self, worker: SimulatedWorker, partition: Partition, call: Call, group: SimulatedGroup | None = None
    ) -> NDArray[np.int64]:
        """A task."""
        rank, ids = partition.rank, partition.sample_ids.copy()
        await asyncio.sleep(self.rng.choice([0, 0.1, 3]))
        for name, rows in self.world.store.truth.items():  # nothing has changed while the task ran
            np.testing.assert_array_equal(partition[name], rows[ids])
        if call.kind == "nested":
            await self._nested(worker, rank in call.mistaken)
        elif rank in call.mistaken:
            raise Mistake(f"of rank {rank}")
        if group is not None:
            mean = await group.mean_of(np.array([ids.sum(), len(ids)], dtype=float), weight=1.0)
            total = [sum(range(N_SAMPLES)), N_SAMPLES] if call.whole else mean * group.size
            np.testing.assert_allclose(mean * group.size, total)
        if call.mark is not None:
            partition.mark_trained(min(call.mark, len(partition) - 1))  # something is left
        if not worker.process.dead:
            self._assert_same(call.ids.setdefault(rank, ids), ids)
            call.trained.add(rank)
        return ids

    def _assert_same(self, ids: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        """Two tasks of a rank have the same samples, in the same order unless a worker with another build runs one.

        Digests are of samples in any order. Another build may draw the same samples for a rank that it takes.
        """
        if BUILD in self.world.schedule.faults:
            ids, others = np.sort(ids), np.sort(others)
        np.testing.assert_array_equal(ids, others)

    async def _nested(self, worker: SimulatedWorker, mistaken: bool) -> None:
        """Let another task run, and wait for it without a thread of the worker, as Dask does."""
        name = self.world.new_name("nested")
        [future] = self.world.client_on(worker).submit_tasks({name: (_inner, mistaken)}, {name: [worker.address]})
        worker.threads.release()
        try:
            await future._result()
        finally:
            await worker.threads.acquire()

    # -- an epoch in two sessions ------------------------------------------------------------------------------------

    def _stop_in_the_middle(self, shuffler: Shuffler, epoch: Epoch) -> dict[str, Any] | None:
        call = self._call(epoch, "map", self.rng.randrange(N_SAMPLES // 5))
        self._fetch(call)
        if not call.fetched:
            return None
        try:
            state = shuffler.state_dict()
        except DShuffleError as error:
            self.world.needs_faults(error)
            self.world.seen[f"no state: {type(error).__name__}"] += 1
            return None
        remainder = SessionState.from_dict(state, self.world.dataset).next
        assert remainder.epoch == epoch.number
        [counts] = remainder.trained or [(0,) * len(self.ranks)]
        self._forget()
        self.before = [ids[:count] for ids, count in zip(call.results, counts, strict=True)]
        return state

    def _resume(self, state: dict[str, Any]) -> Shuffler:
        before, self.resumed = self.before, True
        for _ in range(ATTEMPTS):
            try:
                shuffler = Shuffler.resume(self.world.client, self.world.dataset, state, **self.options)
            except DShuffleError as error:
                self.world.needs_faults(error)
                self.world.seen[f"not resumed: {type(error).__name__}"] += 1
                self.world.pass_time(20)
            else:
                self.before = before
                self.world.seen["resumed"] += 1
                return shuffler
        raise WorkerLost("the session could not be resumed")


def check_meant(error: BaseException) -> None:
    """An error that a process did not expect travels as text with its name. No fault is a reason for it."""
    if UNEXPECTED.search(str(error)):
        raise AssertionError(f"{type(error).__name__}: {error}") from error


async def _inner(worker: SimulatedWorker, mistaken: bool) -> int:
    await asyncio.sleep(0.01)
    if mistaken:
        raise Mistake("of a nested task")
    return 0
