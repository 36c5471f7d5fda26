"""Random schedules of whole sessions in virtual time.

    PYTHONHASHSEED=0 python -m tests.runtime.simulation.simulation 5000 [first seed]

runs that many schedules, and prints what has happened in them, and which combinations have been covered.

The shufflers, plugins, sessions, endpoints and plans are the real ones, and so are Dask's futures, and its scheduler's
tables of tasks. The network, the threads, the clock, the processes and most datasets are simulated. After every epoch
that has ended: each task has run, each sample was trained on exactly once, with the bytes of the dataset, and by the
rank that trains on it without faults. Every call of the client ends, and after the session nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.planning.remainder import training_orders

from .client import SimulatedClient
from .cluster import SimulatedCluster, simulated
from .datasets import N_SAMPLES, Store
from .schedule import BUILD, CHANGES, EPOCHS, MISTAKES, RATES, STRIKES, WAYS, Schedule, possible
from .script import Script, Trained
from .virtual_time import VirtualLoop
from .worker import SimulatedWorker


class World:
    """A cluster, a client with its sessions, and what strikes them.

    Parameters
    ----------
    loop
        The event loop.
    schedule
        What happens.
    store
        Where the dataset is.
    seen
        Counts what has happened.
    """

    def __init__(self, loop: VirtualLoop, schedule: Schedule, store: Store, seen: Counter[str]) -> None:
        self.schedule, self.store, self.seen, self.loop = schedule, store, seen, loop
        self.rng: random.Random = loop.rng
        self.dataset = store.on_disk if schedule.on_disk else store.in_memory
        rates = {fault: RATES[fault] * self.rng.choice([0.3, 1, 3]) for fault in sorted(schedule.faults & RATES.keys())}
        self.cluster = SimulatedCluster(loop, rates, seen)
        self.client = SimulatedClient(self.cluster, "client")
        self._clients: dict[str, SimulatedClient] = {}
        for name in range(schedule.n_workers):
            self.cluster.join(name)
        if BUILD in schedule.faults:
            self.seen[BUILD] += 1
            self.rng.choice(list(self.cluster.workers.values())).process.draws_differently = True
        self.scripts = [Script(self, workload) for workload in schedule.workloads]
        self._begun = False
        self._numbers = itertools.count()

    def run(self) -> None:
        """Let the scripts run side by side until they have ended."""
        strikes = self.loop.create_task(self._strike())
        running = [script.run() for script in self.scripts]
        while running:
            script = self.rng.choice(running)
            try:
                next(script)
            except StopIteration:
                running.remove(script)
        strikes.cancel()
        self.store.come_back()
        self.pass_time(200)
        self._check_nothing_left()
        for error in self.cluster.errors:
            raise AssertionError("nobody has seen an error") from error

    def begin(self) -> None:
        """A session is open."""
        if self.schedule.spare and not self._begun:
            self.loop.create_task(self.cluster.add("spare"))
        self._begun = True

    def client_on(self, worker: SimulatedWorker) -> SimulatedClient:
        """The client of the tasks on a worker."""
        name = worker.address.partition("//")[2].replace(":", "-")
        if name not in self._clients:
            self._clients[name] = SimulatedClient(self.cluster, f"client-on-{name}")
        return self._clients[name]

    def new_name(self, kind: str) -> str:
        """A name of a worker or a task."""
        return f"{kind}-{next(self._numbers)}"

    def pass_time(self, seconds: float) -> None:
        """Do nothing for some time."""
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def needs_faults(self, error: BaseException) -> None:
        """An error that must have a reason."""
        if not self.schedule.faults - set(MISTAKES):
            raise AssertionError("failed for no reason") from error

    async def _strike(self) -> None:
        """Let something break now and then."""
        faults = sorted(self.schedule.faults & {*STRIKES, *CHANGES})
        while faults:
            await asyncio.sleep(self.rng.expovariate(self.rng.choice([0.1, 0.5, 2])))
            fault = self.rng.choice(faults)
            self.seen[fault] += self._strikes(fault)

    def _strikes(self, fault: str) -> bool:
        """Let a fault strike; whether it can."""
        cluster, rng, now = self.cluster, self.rng, self.loop.now
        alive = cluster.alive()
        if not alive:  # the last ones have retired
            return False
        if fault == "crash" and len(alive) > 1:
            cluster.crash(rng.choice(alive), comes_back=rng.random() < 0.9, noticed=rng.random() < 0.7)
        elif fault == "retire" and len(staying := cluster.staying()) > 2:
            self.loop.create_task(cluster.retire(rng.choice(staying), asked=rng.random() < 0.5))
        elif fault == "join" and len(alive) < 6:
            self.loop.create_task(cluster.add(self.new_name("new")))
        elif fault == "stop":
            cluster.workers[rng.choice(alive)].process.stop(now + rng.choice([2, 5, 40]))
        elif fault == "slow":
            process = rng.choice([cluster.main, *(cluster.workers[address].process for address in alive)])
            process.slow_down(now + rng.choice([5, 20]), rng.choice([0.01, 0.1, 0.5]))
        elif fault == "cut":
            pair = frozenset(rng.sample([*alive, cluster.main.address], 2))
            cluster.network.cut.add(pair)
            self.loop.call_later(rng.choice([1, 20, 60]), cluster.network.cut.discard, pair)
        elif fault == "store away" and not self.store.is_away:
            self.store.go_away()
            self.loop.call_later(rng.choice([0.5, 5]), self.store.come_back)
        elif fault == "disconnect" and self.client.status == "running" and rng.random() < 0.3:
            self.client.lose_connection(rng.choice([0.1, 1, 3]))
        else:
            return False
        return True

    def _check_nothing_left(self) -> None:
        plugin, main = self.cluster.plugin, self.cluster.main
        assert plugin is None or not plugin.coordinators
        assert plugin is None or not plugin._opening
        assert plugin is None or not plugin._freeing
        for address, worker in self.cluster.workers.items():
            if worker.process.dead or "dshuffle" not in worker.plugins:
                continue
            sessions = worker.plugins["dshuffle"].sessions
            assert not sessions, f"a session is left on {address}"
            assert not sessions._reserved, f"memory is left reserved on {address}"
            assert not sessions.ids, f"a session still opens on {address}"
            assert not worker.process.tasks, f"tasks are left on {address}: {list(worker.process.tasks)}"
        assert not main.tasks, f"tasks are left on the scheduler: {list(main.tasks)}"


def run(schedule: Schedule, store: Store, seen: Counter[str]) -> list[dict[int, Trained]]:
    """Run one schedule. Returns what each rank trained on in each epoch that has ended, for each session."""
    with simulated(random.Random(schedule.seed)) as loop:
        world = World(loop, schedule, store, seen)
        try:
            world.run()
        finally:
            store.come_back()
            for script in world.scripts:
                script.abandon()
        return [script.trained for script in world.scripts]


class Simulation:
    """Runs schedules, each beside the same one without faults.

    Parameters
    ----------
    store
        Where the dataset is.
    """

    def __init__(self, store: Store) -> None:
        self.seen: Counter[str] = Counter()
        self.covered: set[tuple[str, str]] = set()
        self._store = store
        self._usual = functools.cache(self._without_faults)

    def run(self, schedule: Schedule) -> None:
        """Run a schedule. An AssertionError or another error says that something is wrong."""
        seen: Counter[str] = Counter()
        sessions = run(schedule, self._store, seen)
        for session in sessions:
            for epoch, trained in session.items():
                usual = self._expected(schedule.way, epoch, trained)
                assert BUILD in schedule.faults or trained.samples == usual, "other samples than without faults"
        self.covered.update(schedule.values(fault for fault, count in seen.items() if count))
        self.seen += seen

    def _without_faults(self, way: int, n_workers: int) -> dict[int, Trained]:
        [session] = run(Schedule(0, way, n_workers, EPOCHS, frozenset()), self._store, Counter())
        return session

    def _expected(self, way: int, epoch: int, trained: Trained) -> dict[int, list[int]]:
        # The number of workers may differ: one was lost before the session opened, or has joined or left.
        if not trained.history.changes:
            return self._usual(way, trained.history.n_workers)[epoch].samples
        return planned(way, epoch, trained)


def planned(way: int, epoch: int, trained: Trained) -> dict[int, list[int]]:
    """What each rank trains on in an epoch, according to planning alone."""
    spec = ShuffleSpec(N_SAMPLES, trained.history.n_workers, Choices(**WAYS[way], seed=7))
    orders = training_orders(spec.with_history(trained.history, epoch), epoch)
    return {rank: ids.tolist() for rank, ids in enumerate(orders)}


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Let collections of garbage pass over all that is there: they are half of the time otherwise."""
    frozen_already = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_already:  # as in a run of all tests
            gc.unfreeze()


def simulate(seeds: range) -> Simulation:
    """Run the schedules of some seeds."""
    with tempfile.TemporaryDirectory() as folder, frozen():
        simulation = Simulation(Store(folder))
        for seed in seeds:
            schedule = Schedule.of(seed)
            try:
                simulation.run(schedule)
            except Exception as error:
                raise AssertionError(f"{schedule}: {type(error).__name__}: {error}") from error
        return simulation


def main(arguments: list[str]) -> Any:
    """Run the schedules that the command line says."""
    first = int(arguments[1]) if len(arguments) > 1 else 0
    simulation = simulate(range(first, first + int(arguments[0])))
    print(dict(simulation.seen))
    print("not covered:", sorted(possible() - simulation.covered))


if __name__ == "__main__":
    main(sys.argv[1:])
