"""Workers in the jobs of a batch system."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dask
from dask.utils import parse_bytes
from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.pipeline.job_records import JobRecords
from dshuffle.pipeline.job_watch import JobWatch, watched
from dshuffle.pipeline.jobqueue import check_options, jobqueue
from dshuffle.runtime.client.cluster_view import DEFAULT_LOST, LOST_WORKER, Waiting, wait_for_workers
from dshuffle.runtime.settings import as_seconds

SOON = "5s"
"""Value of ``LOST_WORKER`` for batch jobs, unless the user has set another one. A nanny starts a worker again within
it. After it, a job whose worker was lost is submitted again."""

SYSTEMS = ("HTCondor", "LSF", "Moab", "OAR", "PBS", "SGE", "SLURM")
"""Batch systems of dask-jobqueue, as its classes begin."""


@dataclass(frozen=True, slots=True)
class BatchJobs:
    """Workers in the jobs of a batch system, through dask-jobqueue.

    Parameters
    ----------
    system
        ``"SLURM"``, ``"PBS"``, ``"SGE"``, ``"LSF"``, ``"OAR"``, ``"Moab"`` or ``"HTCondor"``.
    jobs
        Number of jobs to submit. A job that ends, at its walltime or because its node fails, is submitted again. A job
        that ends before its worker has connected, or that the batch system refuses, is submitted up to three times in
        a row.
    min_workers
        Number of workers to start with, while other jobs wait in the queue; by default all of them. A session uses the
        workers that are there when it opens. Later ones replace lost workers.
    patience
        Time to wait for them: seconds, or text such as ``"1h"``.
    options
        Arguments of the class of dask-jobqueue, such as ``{"cores": 1, "memory": "16 GiB", "walltime": "02:00:00",
        "interface": "ib0", "local_directory": "/local/scratch"}``. Without ``processes``, here or in the configuration
        of dask-jobqueue, a job is a single worker.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.
    """

    system: str
    jobs: int
    min_workers: int | None = None
    patience: str | float = "1h"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.system.lower() not in map(str.lower, SYSTEMS):
            raise InvalidParameter.of("system", self.system, f"one of {', '.join(SYSTEMS)}")
        as_integer("jobs", self.jobs, 1)
        workers = as_integer("options['processes']", self._processes, 1) * self.jobs
        if (memory := self.options.get("memory")) is not None:
            try:
                parse_bytes(memory)
            except (ValueError, TypeError):
                raise InvalidParameter.of("options['memory']", memory, 'bytes, such as "16 GiB"') from None
        if self.min_workers is not None and as_integer("min_workers", self.min_workers, 1) > workers:
            raise InvalidParameter.of("min_workers", self.min_workers, f"at most {workers}, the workers of all jobs")
        as_seconds("patience", self.patience)

    def __str__(self) -> str:
        return f"{self.n_workers} workers in {self.jobs} {self.system} jobs"

    @property
    def n_workers(self) -> int:
        """Number of workers to start with."""
        return self.min_workers or self.jobs * self._processes

    @property
    def _processes(self) -> Any:
        """Workers of a job. Dask-jobqueue's own default is several for a job of several cores."""
        name = self.options.get("config_name", self.system.lower())
        for processes in (self.options.get("processes"), dask.config.get(f"jobqueue.{name}.processes", None)):
            if processes is not None:
                return processes
        return 1

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers to wait for, and for how long."""
        return self.n_workers, self.patience

    @property
    def worker_memory(self) -> int | None:
        """Memory limit of a worker in bytes; None if the configuration of dask-jobqueue has it."""
        memory = self.options.get("memory")
        return None if memory is None else int(parse_bytes(memory)) // int(self._processes)

    @property
    def _cluster_class(self) -> Any:
        """The class of dask-jobqueue."""
        [name] = [name for name in SYSTEMS if name.lower() == self.system.lower()]
        return getattr(jobqueue(), f"{name}Cluster")

    def check(self) -> None:
        """Check that dask-jobqueue is installed, and takes the options."""
        check_options(self._cluster_class, self._options)

    @property
    def _options(self) -> dict[str, Any]:
        name = self.options.get("config_name", self.system.lower())
        arguments = self.options.get("worker_extra_args")
        if arguments is None:
            arguments = dask.config.get(f"jobqueue.{name}.worker-extra-args", None) or []
        # While a worker starts, it loads what the session would wait for.
        return {
            **self.options,
            "processes": self._processes,
            "worker_extra_args": [*arguments, "--preload", "dshuffle"],
        }

    @contextmanager
    def open(self, waiting: Waiting | None = None) -> Iterator[Client]:
        """Submit the jobs, and wait for the workers. Jobs that end are submitted again.

        Raises
        ------
        InvalidParameter
            If dask-jobqueue is not installed, or refuses the options.
        ClusterError
            If the scheduler cannot start, or the batch system refuses so many jobs, or so many of them fail, that
            there will not be enough workers; or if there are not enough in time.
        """
        self.check()
        with contextlib.ExitStack() as stack:
            if dask.config.get(LOST_WORKER, DEFAULT_LOST) == DEFAULT_LOST:
                stack.enter_context(dask.config.set({LOST_WORKER: SOON}))
            lost_after = as_seconds(LOST_WORKER, dask.config.get(LOST_WORKER))
            records = JobRecords(self.system, self.jobs, self._processes, lost_after)
            try:
                cluster = stack.enter_context(watched(self._cluster_class, records)(**self._options))
            except RuntimeError as error:
                raise ClusterError(f"the scheduler of the jobs cannot start: {error}", transient=False) from error
            asks_slurm = self.system.lower() == "slurm"
            stack.enter_context(JobWatch(cluster, self._processes, asks_slurm=asks_slurm))
            cluster.adapt(minimum_jobs=self.jobs, maximum_jobs=self.jobs)
            client = stack.enter_context(Client(cluster))
            wait_for_workers(client, *self.awaited, waiting)
            yield client

    def to_dict(self) -> dict[str, Any]:
        """The source as JSON can hold it."""
        return {"kind": "jobs", **{**dataclasses.asdict(self), "options": dict(self.options)}}
