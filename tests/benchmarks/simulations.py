"""Random schedules in virtual time: of whole sessions, of the session machine, and of inboxes and outboxes.

python tests/benchmarks/simulations.py sessions --schedules 100000 --processes 2
python tests/benchmarks/simulations.py machine --schedules 1000000
python tests/benchmarks/simulations.py exchange --schedules 100000

Every schedule follows from its seed. Seeds that fail are printed with what failed, and the run goes on. To run one of
them again, give it as ``--first`` with ``--schedules 1``: a schedule of sessions is then made smaller and printed.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.exchange.test_schedules import run_schedule
from tests.runtime.scheduler.simulator import World as MachineWorld
from tests.runtime.simulation.datasets import Store
from tests.runtime.simulation.schedule import Schedule, possible
from tests.runtime.simulation.simulation import Simulation, frozen, simulate

AT_A_TIME = {"sessions": 50, "machine": 500, "exchange": 20}
"""Schedules that a process runs before it reports."""


@dataclass
class Report:
    """What has happened in some schedules."""

    n_schedules: int = 0
    cpu_seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    covered: set[tuple[str, str]] = field(default_factory=set)

    def add(self, other: Report) -> None:
        """Add another report."""
        self.n_schedules += other.n_schedules
        self.cpu_seconds += other.cpu_seconds
        self.failures |= other.failures
        self.seen += other.seen
        self.covered |= other.covered


@functools.cache
def simulation() -> Simulation:
    """The simulation of this process."""
    folder = tempfile.TemporaryDirectory(prefix="simulations-")
    made = Simulation(Store(folder.name))
    made.folder = folder  # type: ignore[attr-defined]  # it lasts as long as the process
    return made


def sessions(seeds: range) -> Report:
    """Run schedules of whole sessions."""
    here = simulation()
    here.seen, here.covered = Counter(), set()
    with frozen():
        report = tried(seeds, lambda seed: here.run(Schedule.of(seed)))
    report.seen, report.covered = here.seen, here.covered
    return report


def machine(seeds: range) -> Report:
    """Run schedules of the session machine, with models of the workers."""
    seen: Counter[str] = Counter()
    report = tried(seeds, lambda seed: MachineWorld(seed, seen).run(epochs=6))
    report.seen = seen
    return report


def exchange(seeds: range) -> Report:
    """Run schedules of inboxes and outboxes."""
    seen: Counter[str] = Counter()
    report = tried(seeds, lambda seed: run_schedule(seed, seen))
    report.seen = seen
    return report


def tried(seeds: range, run: Callable[[int], None]) -> Report:
    """Run schedules, and note which of them fail."""
    logging.disable(logging.CRITICAL)  # of tasks of processes that were killed
    warnings.simplefilter("ignore", RuntimeWarning)
    report, started = Report(len(seeds)), time.process_time()
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            cause = f", because of {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
            report.failures[seed] = f"{type(error).__name__}: {error}{cause}"
    report.cpu_seconds = time.process_time() - started
    return report


KINDS = {"sessions": sessions, "machine": machine, "exchange": exchange}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--schedules", default=1000, show_default=True)
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--processes", default=os.cpu_count(), show_default=True)
@click.option("--seconds", default=float("inf"), help="No schedules are begun after this time.")
def main(kind: str, schedules: int, first: int, processes: int, seconds: float) -> None:
    """Run schedules in several processes."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a schedule
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    if kind == "sessions" and schedules == 1:
        print(dict(simulate(range(first, first + 1)).seen))
        return
    total, started, said, seeds = Report(), time.monotonic(), 0.0, range(first, first + schedules)
    parts = [seeds[place : place + AT_A_TIME[kind]] for place in range(0, schedules, AT_A_TIME[kind])]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for report in pool.imap(KINDS[kind], parts):
            for seed, failure in report.failures.items():
                print(f"\nseed {seed}: {failure}", flush=True)
            total.add(report)
            elapsed = time.monotonic() - started
            if elapsed > said + 1 or total.n_schedules == schedules:
                said, rate = elapsed, total.n_schedules / elapsed
                words = f"{total.n_schedules} schedules, {len(total.failures)} failed, {elapsed:.0f} s"
                print(f"\r{words}, {rate:.1f} a second", end="", flush=True)
            if elapsed > seconds:
                break
    print(f"\n{total.n_schedules / total.cpu_seconds:.1f} schedules a second of processor time")
    print(", ".join(f"{name}: {count}" for name, count in total.seen.most_common()))
    if kind == "sessions":
        print("not covered:", sorted(possible() - total.covered))
    if total.failures:
        sys.exit(f"these seeds failed: {' '.join(map(str, total.failures))}")


if __name__ == "__main__":
    main()
