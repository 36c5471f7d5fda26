"""Look for what commonly goes wrong on a cluster: versions, clocks, memory, open files, the dataset, and links."""

from __future__ import annotations

import asyncio
import enum
import importlib.metadata
import platform
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from distributed import Client, Worker

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.planning.cost import Work, predict
from dshuffle.runtime.client.cluster_view import answer, cluster_info, run_on_workers
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.measure.measurement import measure_cluster
from dshuffle.runtime.process import files_needed, member_nbytes, workers_that_fit
from dshuffle.runtime.session_spec import DatasetReference, only_serves
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.units import human_bytes, human_rate, human_seconds

PACKAGES = ("dshuffle", "dask", "distributed", "numpy", "zarr", "numba", "cloudpickle", "msgpack")
"""Packages that must have the same version everywhere."""

CLOCKS = 1.0
"""Seconds by which clocks may differ. Certificates and signatures of S3 requests have times."""

USED_MEMORY = 0.6
"""Part of its memory limit that a worker may use before a session opens."""

FEWEST_FILES = 1024
"""Open files that any process should be allowed, whatever the number of workers: chunks and objects at once."""

SLOW_LINK = 12.5e6
"""A link with fewer bytes per second (100 Mbit/s) is probably in the wrong network."""

MEASURING_SECONDS = 3.0
"""Duration of the measurement of links."""


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do; nothing if the remedy is empty."""

    level: Level
    subject: str
    observation: str
    remedy: str = ""


def some(names: list[str]) -> str:
    """The first three of some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def look_at_process() -> dict[str, Any]:
    """Facts about the process in which this runs. Runs on the client, the scheduler and every worker."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"versions": versions, "clock": time.time(), "open_files": soft, "most_open_files": hard}


async def look_at_worker(dataset: DatasetReference | None, dask_worker: Worker) -> dict[str, Any]:
    """Facts about a worker, and whether it can open a dataset. Runs on every worker."""
    seen = ""
    if dataset is not None:
        try:
            await asyncio.to_thread(dataset.open)
        except Exception as error:  # whatever a store raises
            seen = f"{type(error).__name__}: {error}"
    return {
        **look_at_process(),
        "dataset_error": seen,
        "trains": not only_serves(dask_worker.state.total_resources),
        "memory": psutil.Process().memory_info().rss,
        "memory_limit": dask_worker.memory_manager.memory_limit or 0,
    }


def diagnose(client: Client, dataset: Dataset | None = None) -> list[Finding]:
    """Look at a client, its scheduler and all workers."""
    workers = cluster_info(client)["workers"]
    reference = None if dataset is None else DatasetReference.of(dataset)
    before, client_facts = time.time(), look_at_process()
    try:
        replies = run_on_workers(client, look_at_worker, reference, on_error="return")
    except OSError as error:
        raise ClusterError(
            f"the workers cannot be looked at: {error}. See the dashboard for those that hang"
        ) from error
    try:
        replies["scheduler"] = answer(client, lambda: client._run_on_scheduler(look_at_process), "the scheduler")
    except Exception as error:  # whatever the import raises there
        replies["scheduler"] = error
    between = before, time.time()
    failed = {where: facts for where, facts in replies.items() if isinstance(facts, BaseException)}
    facts = {where: process for where, process in replies.items() if where not in failed}
    everybody = {"client": client_facts, **facts}
    findings = [_of_workers(workers), *_of_failures(failed), *_of_versions(everybody)]
    # Another version of dshuffle may look at other things.
    everybody = {where: process for where, process in everybody.items() if process.keys() >= client_facts.keys()}
    own = {where: process for where, process in everybody.items() if "memory" in process}
    findings += [_of_clocks(everybody, between), _of_open_files(len(workers), everybody), *_of_memory(own)]
    if dataset is not None:
        findings += [_of_dataset(dataset, own), *_of_partitions(dataset, own)]
    return findings


def of_links(client: Client, dataset: Dataset, seconds: float = MEASURING_SECONDS) -> Finding:
    """Rates at which workers receive from each other and read the dataset, measured."""
    try:
        measurement = measure_cluster(client, dataset, seconds=seconds)
    except DShuffleError as error:
        return Finding(Level.ERROR, "links", str(error), "See the logs of the workers.")
    store = f"all workers together read {human_rate(measurement.storage_together)} of rows from the dataset"
    work = Work(dataset.n_samples, dataset.row_nbytes, Choices(), unit_rows(dataset))
    if dataset.n_samples >= measurement.cluster.n_workers:
        load = predict(measurement.cluster, work).load_seconds
        store += f", and load their first partitions in {human_seconds(load)}"
    if not measurement.link_alone:
        return Finding(Level.OK, "links", f"there is one worker; {store}")
    text = (
        f"a worker receives {human_rate(measurement.link_alone)} from another one, and "
        f"{human_rate(measurement.link_together)} while all exchange; {store}"
    )
    if measurement.link_alone < SLOW_LINK:
        return Finding(Level.WARNING, "links", text, "Workers may use the wrong network. Name it with interface=.")
    return Finding(Level.OK, "links", text)


def _of_workers(workers: Mapping[str, Any]) -> Finding:
    if not workers:
        return Finding(Level.ERROR, "workers", "there are none", "Start workers, and wait for them.")
    serving = sum(only_serves(worker.get("resources")) for worker in workers.values())
    hosts = len({worker["host"] for worker in workers.values()})
    paused = [where for where, worker in workers.items() if worker.get("status") == "paused"]
    text = f"{len(workers)} on {hosts} {'host' if hosts == 1 else 'hosts'}"
    if serving:
        text += f"; {serving} of them only {'serves' if serving == 1 else 'serve'}"
    if paused:
        remedy = "Dask pauses a worker at 80 % of its memory limit. Free memory there, or raise the limit."
        return Finding(Level.WARNING, "workers", f"{text}; paused: {some(paused)}", remedy)
    return Finding(Level.OK, "workers", text)


def _of_failures(failed: Mapping[str, BaseException]) -> Iterator[Finding]:
    for where, error in failed.items():
        remedy = (
            "Install the same version of dshuffle there." if isinstance(error, ImportError) else "See the log there."
        )
        yield Finding(Level.ERROR, "reachable", f"{where}: {type(error).__name__}: {error}", remedy)


def _of_versions(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    here, same = facts["client"]["versions"], True
    for name in here:
        installed = {where: process["versions"].get(name) for where, process in facts.items()}
        [(usual, _)] = Counter(installed.values()).most_common(1)
        if differences := [f"{where} has {version}" for where, version in installed.items() if version != usual]:
            same = False
            minor = name == "python" and len({str(version).rpartition(".")[0] for version in installed.values()}) == 1
            text = f"{name} is {usual}, but {some(differences)}"
            level = Level.WARNING if minor else Level.ERROR
            yield Finding(level, "versions", text, "Install the same versions everywhere.")
    if same:
        text = ", ".join(f"{name} {here[name]}" for name in ("dshuffle", "distributed", "zarr", "numba"))
        yield Finding(Level.OK, "versions", f"the same everywhere: Python {here['python']}, {text}")


def _of_clocks(facts: Mapping[str, Mapping[str, Any]], between: tuple[float, float]) -> Finding:
    first, last = between
    apart = {where: max(first - process["clock"], process["clock"] - last - 1.0) for where, process in facts.items()}
    wrong = [f"{where} by {human_seconds(seconds)}" for where, seconds in apart.items() if seconds > CLOCKS]
    if wrong:
        remedy = "Synchronize the clocks (NTP). S3 refuses requests of a wrong time, and logs cannot be compared."
        return Finding(Level.WARNING, "clocks", f"differ from the client's: {some(wrong)}", remedy)
    return Finding(Level.OK, "clocks", "agree within a second")


def _of_open_files(n_workers: int, facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Whether all processes may open a connection for each worker. Workers raise their limits to the hard ones."""
    needed = max(FEWEST_FILES, files_needed(n_workers))
    why = f"{n_workers} workers need {needed}"
    limits = {
        where: process["most_open_files" if "memory" in process else "open_files"] for where, process in facts.items()
    }
    if limited := [f"{where} {limit}" for where, limit in limits.items() if 0 <= limit < needed]:
        remedy = f"Raise the limit to {needed} or more (ulimit -n; for workers the hard limit, ulimit -Hn)."
        return Finding(Level.WARNING, "open files", f"few are allowed: {some(limited)}; {why}", remedy)
    return Finding(Level.OK, "open files", f"at least {needed} are allowed everywhere; {why}")


def _of_memory(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    limits = {where: worker["memory_limit"] for where, worker in facts.items() if worker["memory_limit"]}
    used = [
        f"{where} uses {human_bytes(facts[where]['memory'])} of {human_bytes(limit)}"
        for where, limit in limits.items()
        if facts[where]["memory"] > USED_MEMORY * limit
    ]
    if used:
        yield Finding(
            Level.WARNING, "memory", f"little is left: {some(used)}", "Restart these workers, or raise the limit."
        )
    elif limits:
        yield Finding(Level.OK, "memory", f"every worker may use at least {human_bytes(min(limits.values()))}")
    elif facts:
        remedy = "A partition that is too large is then noticed only when the system runs out of memory."
        yield Finding(Level.WARNING, "memory", "workers have no memory limit", remedy)


def _of_dataset(dataset: Dataset, facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    failed = [f"{where}: {worker['dataset_error']}" for where, worker in facts.items() if worker["dataset_error"]]
    if failed:
        remedy = "All workers must see the same data under the same URL, with the same credentials."
        return Finding(Level.ERROR, "dataset", some(failed), remedy)
    return Finding(Level.OK, "dataset", f"{dataset.n_samples:,} samples, the same on every worker")


def _of_partitions(dataset: Dataset, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether the partitions of a dataset fit into the memory of the workers that train."""
    limits = [worker["memory_limit"] for worker in facts.values() if worker["memory_limit"] and worker["trains"]]
    if not limits or dataset.n_samples < len(limits):
        return
    shuffle = ShuffleSpec(dataset.n_samples, len(limits), Choices())
    needed, room = member_nbytes(shuffle, dataset.layout), int(Settings.from_config().memory_fraction * min(limits))
    text = f"a partition takes {human_bytes(needed)} of the {human_bytes(room)} that a worker may use for it"
    if needed <= room:
        yield Finding(Level.OK, "memory", text)
        return
    enough = workers_that_fit(shuffle, dataset.layout, room)
    more = "" if enough is None else f" at least {enough} workers,"
    yield Finding(Level.WARNING, "memory", text, f"Use{more} a larger memory limit, or a cache_directory.")
