"""Look for what commonly goes wrong on a cluster: versions, clocks, limits, disks, and the dataset."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
from distributed import Client, Worker

from dshuffle.errors import ClusterError
from dshuffle.runtime.client.bounded_calls import answer, run_on_workers
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.measure.diagnosis_of_size import of_open_files, of_resources, of_unequal_workers
from dshuffle.runtime.measure.diagnosis_of_use import (
    EXTRAS,
    file_system,
    of_extras,
    of_local_files,
    of_partitions,
    versions,
)
from dshuffle.runtime.measure.finding import Finding, Level, some
from dshuffle.runtime.server_resource import only_serves
from dshuffle.runtime.session_spec import DatasetReference
from dshuffle.store import Dataset
from dshuffle.units import human_bytes, human_seconds

PACKAGES = ("dshuffle", "dask", "distributed", "numpy", "zarr", "numba", "cloudpickle", "msgpack")
"""Packages that must have the same version everywhere."""

FREE_DISK = 2**30
"""Bytes that should be free in a worker's local directory."""

CLOCKS = 1.0
"""Seconds by which clocks may differ. Certificates and signatures of S3 requests have times."""

USED_MEMORY = 0.6
"""Part of its memory limit that a worker may use before a session opens."""


def look_at_process() -> dict[str, Any]:
    """Facts about the process in which this runs. Runs on the client, the scheduler and every worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "clock": time.time(),
        "open_files": soft,
        "most_open_files": hard,
        "extras": versions(EXTRAS),
    }


async def look_at_worker(dataset: DatasetReference | None, dask_worker: Worker) -> dict[str, Any]:
    """Facts about a worker, and whether it can open a dataset. Runs on every worker."""
    worker, seen = dask_worker, ""
    if dataset is not None:
        try:
            await asyncio.to_thread(dataset.open)
        except Exception as error:  # whatever a store raises
            seen = f"{type(error).__name__}: {error}"
    return {
        **look_at_process(),
        "dataset_error": seen,
        "local_directory": worker.local_directory,
        "file_system": file_system(worker.local_directory),
        "trains": not only_serves(worker.state.total_resources),
        "free_disk": shutil.disk_usage(worker.local_directory).free,
        "memory": psutil.Process().memory_info().rss,
        "threads": worker.state.nthreads,
        "memory_limit": worker.memory_manager.memory_limit or 0,
        "kernel_folder": _kernel_folder(),
        "kernels_writable": os.access(_kernel_folder(), os.W_OK),
    }


def _kernel_folder() -> str:
    """Folder of the compiled kernels, or the one in which it would be made."""
    folder = os.path.abspath(os.environ.get("NUMBA_CACHE_DIR") or os.path.dirname(__file__))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def diagnose(client: Client, dataset: Dataset | None = None) -> list[Finding]:
    """Look at a client, its scheduler and all workers.

    Parameters
    ----------
    client
        A synchronous Dask client.
    dataset
        A dataset that all workers should see.

    Returns
    -------
    list of Finding
        Everything that was looked at, in a fixed order.

    Raises
    ------
    ClusterError
        If a worker or the scheduler does not answer within ``dshuffle.timeout``.

    Examples
    --------
    >>> from distributed import Client
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     {finding.subject for finding in diagnose(client)} >= {"versions", "clocks", "workers"}
    True
    """
    workers = cluster_info(client)["workers"]
    reference = None if dataset is None else DatasetReference.of(dataset)
    before = time.time()
    client_facts = look_at_process()
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
    findings = [_of_workers(workers), *_of_failures(failed), *_of_versions({"client": client_facts, **facts})]
    # Another version of dshuffle may look at other things.
    own = {
        where: process
        for where, process in facts.items()
        if where != "scheduler" and process.keys() >= client_facts.keys()
    }
    facts = {where: process for where, process in facts.items() if process.keys() >= client_facts.keys()}
    soft = {where: process["open_files"] for where, process in {"client": client_facts, **facts}.items()}
    hard = {where: process["most_open_files"] for where, process in own.items()}
    findings += [_of_clocks(facts, between), of_open_files(len(workers), soft, hard)]
    findings += of_unequal_workers(own)
    if (resources := of_resources(workers)) is not None:
        findings.append(resources)
    findings += [of_extras(client_facts["extras"], own), *_of_disks(own), *of_local_files(own), *_of_memory(own)]
    findings.append(_of_kernels(own))
    if dataset is not None:
        findings.append(_of_dataset(dataset, own))
        if (partitions := of_partitions(dataset, own)) is not None:
            findings.append(partitions)
    return findings


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
    names = {"python": {where: process["python"] for where, process in facts.items()}}
    names |= {name: {where: process["versions"][name] for where, process in facts.items()} for name in PACKAGES}
    differing = {name: installed for name, installed in names.items() if len({*installed.values()}) > 1}
    for name, installed in differing.items():
        [(usual, _)] = Counter(installed.values()).most_common(1)
        differences = [f"{where} has {version}" for where, version in installed.items() if version != usual]
        minor = name == "python" and len({str(version).rpartition(".")[0] for version in installed.values()}) == 1
        level = Level.WARNING if minor else Level.ERROR
        yield Finding(
            level, "versions", f"{name} is {usual}, but {some(differences)}", "Install the same versions everywhere."
        )
    if not differing:
        client = facts["client"]
        text = ", ".join(f"{name} {client['versions'][name]}" for name in ("dshuffle", "distributed", "zarr", "numba"))
        yield Finding(Level.OK, "versions", f"the same everywhere: Python {client['python']}, {text}")


def _of_clocks(facts: Mapping[str, Mapping[str, Any]], between: tuple[float, float]) -> Finding:
    first, last = between
    apart = {
        where: max(first - process["clock"], process["clock"] - last - 1.0, 0.0) for where, process in facts.items()
    }
    wrong = [f"{where} by {human_seconds(seconds)}" for where, seconds in apart.items() if seconds > CLOCKS]
    if wrong:
        remedy = "Synchronize the clocks (NTP). S3 refuses requests of a wrong time, and logs cannot be compared."
        return Finding(Level.WARNING, "clocks", f"differ from the client's: {some(wrong)}", remedy)
    return Finding(Level.OK, "clocks", "agree within a second")


def _of_disks(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    full = [
        f"{where} has {human_bytes(worker['free_disk'])} in {worker['local_directory']}"
        for where, worker in facts.items()
        if worker["free_disk"] < FREE_DISK
    ]
    if full:
        yield Finding(Level.WARNING, "local disks", f"nearly full: {some(full)}", "Choose another local_directory.")
    elif facts:
        least = min(worker["free_disk"] for worker in facts.values())
        yield Finding(Level.OK, "local disks", f"at least {human_bytes(least)} are free on every worker")


def _of_memory(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    limited = {where: worker for where, worker in facts.items() if worker["memory_limit"]}
    used = [
        f"{where} uses {human_bytes(worker['memory'])} of {human_bytes(worker['memory_limit'])}"
        for where, worker in limited.items()
        if worker["memory"] > USED_MEMORY * worker["memory_limit"]
    ]
    if used:
        yield Finding(
            Level.WARNING, "memory", f"little is left: {some(used)}", "Restart these workers, or raise the limit."
        )
    elif limited:
        least = min(worker["memory_limit"] for worker in limited.values())
        yield Finding(Level.OK, "memory", f"every worker may use at least {human_bytes(least)}")
    if facts and not limited:
        remedy = "A partition that is too large is then noticed only when the system runs out of memory."
        yield Finding(Level.WARNING, "memory", "workers have no memory limit", remedy)


def _of_kernels(facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    refused = [
        f"{where} ({worker['kernel_folder']})" for where, worker in facts.items() if not worker["kernels_writable"]
    ]
    if refused:
        remedy = "Set NUMBA_CACHE_DIR to a folder that can be written, or run dshuffle warmup once as its owner."
        return Finding(Level.WARNING, "kernel cache", f"cannot be written: {some(refused)}", remedy)
    return Finding(Level.OK, "kernel cache", "can be written on every worker")


def _of_dataset(dataset: Dataset, facts: Mapping[str, Mapping[str, Any]]) -> Finding:
    failed = [f"{where}: {worker['dataset_error']}" for where, worker in facts.items() if worker["dataset_error"]]
    if failed:
        remedy = "All workers must see the same data under the same URL, with the same credentials."
        return Finding(Level.ERROR, "dataset", some(failed), remedy)
    return Finding(Level.OK, "dataset", f"{dataset.n_samples:,} samples, the same on every worker")
