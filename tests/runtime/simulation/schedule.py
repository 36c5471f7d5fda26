"""Random schedules of whole sessions in virtual time.

    python -m tests.runtime.simulation.schedule 5000 [first seed]

runs that many schedules, and prints what has happened in them.

The plugins, sessions, endpoints, plans and the dataset are the real ones. The network, the threads, the clock and the
processes are simulated. Workers crash, stop, come back or do not; links are cut; messages are lost, late or corrupted;
the dataset disappears for some seconds; tasks take their time. After every epoch: each sample was trained on exactly
once, with the bytes of the dataset, and by the rank that trains on it without faults. Every call of the client ends,
and after the session nothing is left of it on any worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dshuffle import Dataset, create_dataset
from dshuffle.errors import DShuffleError, ExchangeError, MembershipChanged, StaleEpoch, WorkerLost
from dshuffle.planning import SERVER, Choices, Remainder, ShuffleSpec, WorkerHistory
from dshuffle.planning.remainder import training_orders
from dshuffle.runtime.replies import unwrap
from dshuffle.runtime.session_spec import Carried, DatasetReference, SessionRequest
from dshuffle.runtime.settings import Settings

from .cluster import SimulatedCluster, simulated

WAYS: list[dict[str, Any]] = [
    {"assignment": "global", "delivery": "peer"},
    {"assignment": "partial:0.3", "delivery": "peer"},
    {"assignment": "local", "delivery": "peer"},
    {"assignment": "global", "delivery": "storage"},
    {"assignment": "chunks:10", "delivery": "peer"},
    {"assignment": "global", "delivery": "peer", "cache_fraction": 0.7},
    {"assignment": "partial:0.3", "delivery": "peer", "cache_fraction": 0.7, "caching": "recent"},
    {"assignment": "global", "delivery": "server"},
    {"assignment": "global", "delivery": "coded", "cache_fraction": 0.7},
    {"assignment": "partial:0.3", "delivery": "clique", "cache_fraction": 0.7, "caching": "even"},
    {"assignment": "aligned", "delivery": "leftover"},
]
SERVED = ("server", "coded", "clique", "leftover")
"""Deliveries whose server may be a worker that does not train."""
RATES = {"lose": 0.02, "late": 0.03, "corrupt": 0.05}
STRIKES = ("crash", "stop", "cut", "store away")
CHANGES = ("retire", "join")
"""What happens to the workers of sessions that may go on with others."""
N_SAMPLES, EPOCHS, HEARTBEAT = 60, 4, 15.0
LIMIT = 1500.0
"""Virtual seconds that any call of the client may take, whatever has happened."""


@dataclass(frozen=True)
class Schedule:
    """What is simulated: everything else follows from the seed."""

    seed: int
    way: int
    n_workers: int
    epochs: int
    faults: frozenset[str]
    dedicated: bool = False  # a server that does not train, if one is needed
    spare: bool = False  # a worker that is not used at first
    elastic: bool = False  # other workers may go on with the next epoch
    resumes: int = -1  # an epoch in whose middle the session ends, and another one goes on

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        faults = frozenset(fault for fault in (*RATES, *STRIKES) if rng.random() < 0.4)
        way, n_workers = rng.randrange(len(WAYS)), rng.randint(2, 4)
        dedicated = n_workers > 2 and WAYS[way]["delivery"] in SERVED and rng.random() < 0.5
        spare = rng.random() < 0.3
        elastic = rng.random() < 0.4
        if elastic:
            faults |= {change for change in CHANGES if rng.random() < 0.7}
        resumes = rng.randrange(EPOCHS) if rng.random() < 0.3 else -1
        return cls(seed, way, n_workers, EPOCHS, faults, dedicated, spare, elastic, resumes)

    def smaller(self) -> list[Schedule]:
        """Schedules with less in them, to look at in place of this one if they fail as well."""
        fewer = [dataclasses.replace(self, faults=self.faults - {fault}) for fault in sorted(self.faults)]
        if self.epochs > 1:
            fewer.append(dataclasses.replace(self, epochs=self.epochs - 1))
        if self.elastic:
            fewer.append(dataclasses.replace(self, elastic=False, faults=self.faults - set(CHANGES)))
        if self.resumes >= 0:
            fewer.append(dataclasses.replace(self, resumes=-1))
        if self.spare:
            fewer.append(dataclasses.replace(self, spare=False))
        if self.n_workers > 2 + self.dedicated:
            fewer.append(dataclasses.replace(self, n_workers=self.n_workers - 1))
        return fewer


@dataclass(frozen=True)
class Trained:
    """What each rank trained on in an epoch, and the workers until then."""

    history: WorkerHistory
    samples: dict[int, list[int]]


class World:
    """A client, its session, and what strikes them."""

    def __init__(self, loop: Any, schedule: Schedule, dataset: Dataset, seen: Counter[str]) -> None:
        self.schedule, self.dataset, self.seen, self.loop = schedule, dataset, seen, loop
        self.rng: random.Random = loop.rng
        rates = {fault: RATES[fault] * self.rng.choice([0.3, 1, 3]) for fault in schedule.faults & RATES.keys()}
        self.cluster = SimulatedCluster(loop, rates, seen)
        self.truth = dataset.read_rows(np.arange(N_SAMPLES))
        self.over = False
        self.struck: Counter[str] = Counter()
        self.changing: list[asyncio.Future[None]] = []
        self.trained: list[Trained | None] = []
        way = WAYS[schedule.way]
        settings = Settings(message_bytes=200, window_bytes=1000, heartbeat=HEARTBEAT)
        self.request = SessionRequest(
            session_id="simulated",
            client_id="client",
            dataset=DatasetReference.of(dataset),
            choices=Choices(**way, seed=7),
            deliveries={way["delivery"]: 1.0},
            memory_limit=None,
            server="0" if schedule.dedicated else None,
            settings=settings,
            on_loss="shrink" if schedule.elastic else "replace",
        )
        self.session_id = "simulated"  # of the session that trains

    async def run(self) -> None:
        await self.cluster.start(self.schedule.n_workers)
        strikes = asyncio.ensure_future(self.strike())
        try:
            await self.session()
        except WorkerLost as error:
            self.seen["WorkerLost"] += 1
            if not self.schedule.faults - {"corrupt", "store away"}:
                raise AssertionError("a worker was lost for no reason") from error
        finally:
            self.over = True
            strikes.cancel()
        await self.call("close", session_id=self.session_id)
        self.heal()
        await asyncio.sleep(200)
        self.check_nothing_left()

    async def session(self) -> None:
        try:
            reply = await self.call("open", order=self.request)
        except DShuffleError as error:
            if not self.schedule.faults:
                raise AssertionError("the session could not be opened for no reason") from error
            self.seen[f"not opened: {type(error).__name__}"] += 1
            return
        if self.schedule.spare:
            await self.cluster.add("spare")
        self.opened(reply)
        for epoch in range(self.schedule.epochs):
            followed = self.schedule.elastic and epoch > 0 and await self.follow(epoch)
            if not followed:
                await self.advance(epoch)
            if self.rng.random() < 0.7:
                await self.call("prefetch", session_id=self.session_id)
            before: list[np.ndarray] = []
            if epoch == self.schedule.resumes:
                before = await self.resume(epoch)
            trained = await self.train_all(epoch)
            assert sorted(np.concatenate(before + trained).tolist()) == list(range(N_SAMPLES)), "lost or doubled"
            ids = {who: samples.tolist() for who, samples in zip(self.ranks, trained, strict=True)}
            self.trained.append(None if before else Trained(self.history, ids))
            self.seen["epochs"] += 1

    def opened(self, reply: dict[str, Any]) -> None:
        self.ranks = [who for who in reply["addresses"] if who != SERVER]
        self.history = WorkerHistory.from_dict(reply["history"])

    async def train_all(self, epoch: int, marks: Sequence[int] | None = None) -> list[np.ndarray]:
        marks = marks or [0] * len(self.ranks)
        tasks = (self.train(who, epoch, mark) for who, mark in zip(self.ranks, marks, strict=True))
        return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT)

    async def resume(self, epoch: int) -> list[np.ndarray]:
        """End the session in the middle of an epoch, and go on in another one; what was trained on before, by rank."""
        orders = await self.train_all(epoch, [self.rng.randrange(N_SAMPLES // 5) for _ in self.ranks])
        try:
            counts = tuple((await self.call("trained", session_id=self.session_id))["trained"])
        except DShuffleError as error:
            self.seen[f"no state: {type(error).__name__}"] += 1
            return []
        await self.call("close", session_id=self.session_id)
        remainder = Remainder(epoch, (counts,) if any(counts) else ())
        carried = Carried.of(self.history, remainder)
        for attempt in range(5):
            self.session_id = f"resumed-{epoch}-{attempt}"
            self.request = dataclasses.replace(
                self.request, session_id=self.session_id, first_epoch=epoch, remainder=remainder, carried=carried
            )
            try:
                self.opened(await self.call("open", order=self.request))
            except DShuffleError as error:
                self.seen[f"not resumed: {type(error).__name__}"] += 1
                await asyncio.sleep(20)
            else:
                break
        else:
            raise WorkerLost("the session could not be resumed")
        await self.advance(epoch)
        self.seen["resumed"] += 1
        return [order[:count] for order, count in zip(orders, counts, strict=True)] if any(counts) else []

    async def follow(self, epoch: int) -> bool:
        """Open another session if the workers have changed, and let it take over; whether it has done so."""
        found = await self.call("membership", session_id=self.session_id)
        if not (found["adopted"] or found["joined"] or found["leaving"]):
            return False
        former, following = self.session_id, f"{self.session_id}-{epoch}"
        addresses = self.cluster.plugin.coordinators[former].addresses
        places = {addresses[who]: who for who in reversed(self.ranks)}
        begins = epoch == self.request.first_epoch
        request = dataclasses.replace(
            self.request,
            session_id=following,
            first_epoch=epoch,
            former=former,
            remainder=self.request.remainder if begins else None,
            carried=self.request.carried if begins else Carried(self.history, epoch - 1, places),
        )
        for _ in range(3):
            try:
                reply = await self.call("open", order=request)
                await self.call("advance", session_id=following, epoch=epoch)
            except DShuffleError as error:
                self.seen[f"not followed: {type(error).__name__}"] += 1
                await self.call("close", session_id=following)
            else:
                await self.call("close", session_id=former)
                self.session_id = following
                self.opened(reply)
                self.seen["followed"] += 1
                return True
        return False

    async def advance(self, epoch: int) -> None:
        for _ in range(10):
            try:
                await self.call("advance", session_id=self.session_id, epoch=epoch)
            except MembershipChanged as error:
                if not await self.follow(epoch):
                    raise WorkerLost("no other session can be opened") from error
                return
            except ExchangeError:
                assert self.schedule.faults
                self.seen["ExchangeError"] += 1
                await asyncio.sleep(5)
            else:
                return
        assert self.schedule.faults
        self.seen["given up"] += 1
        raise WorkerLost("the client gave up")

    async def call(self, operation: str, **message: Any) -> dict[str, Any]:
        """A call of the client. It must end."""
        handler = self.cluster.scheduler.handlers[f"dshuffle_{operation}"]
        work = self.cluster.main.spawn(handler(**message))
        await asyncio.wait([work], timeout=LIMIT)
        assert work.done(), f"{operation} does not end: {self.waiting_for()}"
        return unwrap(work.result(), "the scheduler")

    def waiting_for(self) -> str:
        return "; ".join(one.machine.waiting_for() for one in self.cluster.plugin.coordinators.values())

    async def train(self, rank: int, epoch: int, mark: int) -> np.ndarray:
        """A task: it runs on whichever worker has the rank, and again if that worker is lost before it ends."""
        started = self.loop.time()
        while True:
            coordinator = self.cluster.plugin.coordinators[self.session_id]
            if coordinator.ended:
                raise WorkerLost("the session has ended")
            address = coordinator.addresses[rank]
            process, worker = self.cluster.processes[address], self.cluster.workers[address]
            plugin = worker.plugins.get("dshuffle")
            session = None if plugin is None else plugin.session_of_rank(self.session_id, rank)
            if session is not None and not process.dead:
                try:
                    with session.partition(epoch) as partition:
                        sample_ids = partition.sample_ids.copy()
                        await asyncio.sleep(self.rng.choice([0, 0.1, 3]))
                        for name, rows in self.truth.items():  # nothing has changed while the task ran
                            np.testing.assert_array_equal(partition[name], rows[sample_ids])
                        if mark:
                            partition.mark_trained(min(mark, len(partition)))
                    if not process.dead and coordinator.addresses[rank] == address:
                        return sample_ids
                except StaleEpoch:
                    pass  # another worker has just taken the rank
            assert self.loop.time() - started < LIMIT, f"rank {rank} cannot be trained: {self.waiting_for()}"
            await asyncio.sleep(0.5)

    # -- faults --------------------------------------------------------------------------------------------------

    async def strike(self) -> None:
        """Let something break now and then."""
        possible = sorted(self.schedule.faults & {*STRIKES, *CHANGES})
        while possible:
            await asyncio.sleep(self.rng.expovariate(self.rng.choice([0.1, 0.5, 2])))
            fault = self.rng.choice(possible)
            self.struck[fault] += 1
            self.seen[fault] += 1
            alive = [one for one in self.cluster.workers if not self.cluster.processes[one].dead]
            if fault == "crash" and len(alive) > 1:
                comes_back, noticed = self.rng.random() < 0.9, self.rng.random() < 0.7
                self.cluster.crash(self.rng.choice(alive), comes_back=comes_back, noticed=noticed)
            elif fault == "retire" and len(alive) > 2:
                address = self.rng.choice(alive)
                if address in self.cluster.scheduler.workers:
                    retiring = self.cluster.retire(address, asked=self.rng.random() < 0.5)
                    self.changing.append(asyncio.ensure_future(retiring))
            elif fault == "join" and len(alive) < 6:
                self.changing.append(asyncio.ensure_future(self.cluster.add(f"new-{self.struck[fault]}")))
            elif fault == "stop":
                process = self.cluster.processes[self.rng.choice(alive)]
                process.stopped_until = self.loop.time() + self.rng.choice([2, 5, 40])
            elif fault == "cut":
                pair = frozenset(self.rng.sample([*alive, "sim://scheduler"], 2))
                self.cluster.cut.add(pair)
                self.loop.call_later(self.rng.choice([1, 20, 60]), self.cluster.cut.discard, pair)
            elif fault == "store away" and os.path.exists(self.dataset.url):
                os.rename(self.dataset.url, self.dataset.url + ".away")
                self.loop.call_later(self.rng.choice([0.5, 5]), self.heal)

    def heal(self) -> None:
        if os.path.exists(self.dataset.url + ".away"):
            os.rename(self.dataset.url + ".away", self.dataset.url)

    # -- what must hold ------------------------------------------------------------------------------------------

    def check_nothing_left(self) -> None:
        plugin = self.cluster.plugin
        assert not plugin.coordinators
        assert not plugin._opening
        assert not plugin._freeing
        for address, worker in self.cluster.workers.items():
            if self.cluster.processes[address].dead or "dshuffle" not in worker.plugins:
                continue
            found = worker.plugins["dshuffle"]
            assert not found.sessions, f"a session is left on {address}"
            assert not found._reserved, f"memory is left reserved on {address}"
            assert not found._opening, f"a session still opens on {address}"
            assert not worker.process.tasks, f"tasks are left on {address}: {list(worker.process.tasks)}"
        assert not self.cluster.main.tasks, f"tasks are left on the scheduler: {list(self.cluster.main.tasks)}"


def run(schedule: Schedule, dataset: Dataset, seen: Counter[str]) -> list[Trained | None]:
    """Run one schedule. Returns what each rank trained on in each epoch; None for one that was interrupted."""
    with simulated(random.Random(schedule.seed)) as loop:
        world = World(loop, schedule, dataset, seen)
        try:
            loop.run_until_complete(world.run())
        finally:
            world.heal()
        return world.trained


def shrunk(schedule: Schedule, dataset: Dataset) -> Schedule:
    """The smallest schedule in which something fails as well."""
    for smaller in schedule.smaller():
        try:
            run(smaller, dataset, Counter())
        except Exception:
            return shrunk(smaller, dataset)
    return schedule


def simulate(seeds: range) -> Counter[str]:
    """Run schedules, each beside the same one without faults."""
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        rows = {"x": rng.integers(0, 255, (N_SAMPLES, 12), dtype=np.uint8), "y": np.arange(N_SAMPLES)}
        dataset = create_dataset(f"{folder}/d.zarr", rows, chunk_rows=10)

        @functools.cache
        def without_faults(way: int, n_workers: int) -> list[Trained | None]:
            return run(Schedule(0, way, n_workers, EPOCHS, frozenset()), dataset, Counter())

        def expected(way: int, epoch: int, found: Trained) -> dict[int, list[int]]:
            # The number of workers may differ: one was lost before the session opened, or has joined or left.
            if not found.history.changes:
                usual = without_faults(way, found.history.n_workers)[epoch]
                assert usual is not None
                return usual.samples
            spec = ShuffleSpec(N_SAMPLES, found.history.n_workers, Choices(**WAYS[way], seed=7))
            orders = training_orders(spec.with_history(found.history, epoch), epoch)
            return {who: ids.tolist() for who, ids in enumerate(orders)}

        for seed in seeds:
            schedule = Schedule.of(seed)
            try:
                trained = run(schedule, dataset, seen)
                for epoch, found in enumerate(trained):
                    if found is not None:
                        usual = expected(schedule.way, epoch, found)
                        assert found.samples == usual, "other samples than without faults"
            except Exception as error:
                raise AssertionError(f"{schedule}, or {shrunk(schedule, dataset)}: {error}") from error
    return seen


if __name__ == "__main__":
    start = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(dict(simulate(range(start, start + int(sys.argv[1])))))
