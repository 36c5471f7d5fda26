"""Watches the jobs of a cluster of dask-jobqueue, and lets Dask submit those again that have failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface, SpecCluster
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from dshuffle.pipeline import slurm_jobs
from dshuffle.pipeline.job_records import JobRecords

logger = logging.getLogger(__name__)

PLUGIN = "dshuffle-jobs"
"""Name of the scheduler plugin."""

LOOK = 10.0
"""Seconds between two questions to the batch system, while jobs have no worker."""


class WatchedJob(ProcessInterface):
    """A base of job classes that records whether the batch system accepts a job.

    Dask would write a refusal to its log only, and would neither raise it nor submit the job again.
    """

    records: JobRecords
    name: str
    job_id: str | None

    async def start(self) -> None:
        """Submit the job."""
        try:
            await super().start()
        except (RuntimeError, ValueError, OSError) as error:  # of the command that submits it
            self.records.refused(self.name, words_of(error))
            self.status = Status.running  # what Dask expects here; without a number there is nothing to cancel
        else:
            self.records.submitted(self.name, str(self.job_id))

    async def close(self) -> None:
        """Cancel the job."""
        await super().close()
        self.status = Status.closed  # dask-jobqueue leaves it as it was


class WatchedCluster(SpecCluster):
    """A base of cluster classes that knows the records of its jobs. Waits for workers ask for them."""

    records: JobRecords

    def describe_jobs(self, n_workers: int) -> str:
        """How many jobs without a worker are in which state.

        Raises
        ------
        ClusterError
            If so many workers cannot come any more.
        """
        self.records.check(n_workers)
        return str(self.records)


class JobWatch(SchedulerPlugin):
    """Records the workers of jobs as they connect, and asks the batch system about those that do not.

    Parameters
    ----------
    cluster
        The cluster.
    asks_slurm
        Whether the batch system is Slurm. Of other ones, only refusals are known.
    """

    def __init__(self, cluster: WatchedCluster, processes: int, *, asks_slurm: bool) -> None:
        self._cluster, self._records, self._processes = cluster, cluster.records, processes
        self._asks_slurm, self._next_question = asks_slurm, 0.0
        self._jobs: dict[str, str] = {}  # names of jobs by the addresses of their connected workers
        self._callback = PeriodicCallback(self._begin_to_look, 1000 * min(1.0, LOOK))
        self._look_task: asyncio.Task[None] | None = None

    def __enter__(self) -> JobWatch:
        self._cluster.sync(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.sync(self._stop)

    async def _start(self) -> None:
        self._scheduler.add_plugin(self, name=PLUGIN)
        self._callback.start()

    async def _stop(self) -> None:
        self._callback.stop()
        if self._look_task is not None:
            self._look_task.cancel()
            await asyncio.wait([self._look_task])
        self._scheduler.remove_plugin(PLUGIN)

    @property
    def _scheduler(self) -> Scheduler:
        scheduler: Scheduler | None = self._cluster.scheduler
        assert scheduler is not None
        return scheduler

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Record a worker that has connected. Dask-jobqueue numbers the workers of a job, if it has several."""
        name = str(scheduler.workers[worker].name)
        self._jobs[worker] = name if self._processes == 1 else name.rpartition("-")[0]
        self._records.connected(self._jobs[worker])

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Record a job whose last worker has left."""
        name = self._jobs.pop(worker)
        if name not in self._jobs.values():
            self._records.left(name)

    def _begin_to_look(self) -> asyncio.Task[None]:
        """Begin the next look. The callback awaits it, so there is one look at a time."""
        self._look_task = asyncio.ensure_future(self._look())
        return self._look_task

    async def _look(self) -> None:
        """Ask about jobs without workers, and take those out of the cluster that are due, so that it submits them."""
        jobs = self._cluster.workers
        for record in self._records.due():
            if (job := jobs.get(record.name)) is not None:
                await job.close()  # if this is cancelled, the cluster still has the job, and closes it
                if jobs.get(record.name) is job:
                    del jobs[record.name]
        loop = asyncio.get_running_loop()
        waiting = {record.number for record in self._records.without_worker()}
        if not waiting or not self._asks_slurm or loop.time() < self._next_question:
            return
        self._next_question = loop.time() + LOOK
        try:
            states = await slurm_jobs.states()
        except OSError as error:
            logger.warning("dshuffle: the states of the jobs are not known: %s", error)
            return
        for number in waiting:
            state, reason = states.get(number, (None, ""))
            if state is not None:
                self._records.seen(number, state, reason)
                continue
            try:
                words = await slurm_jobs.ending(number)
            except OSError as error:
                if number not in states and not self._records.was_seen(number):
                    continue  # perhaps it is on another cluster, of which nothing is known here
                words = f"Slurm does not say how it ended ({error})"
            self._records.ended(number, words)


def watched(cluster_class: type[Any], records: JobRecords) -> type[WatchedCluster]:
    """A class of dask-jobqueue whose clusters and jobs write these records."""
    job_class = cluster_class.job_cls
    job = type(job_class.__name__, (WatchedJob, job_class), {"records": records})
    return type(cluster_class.__name__, (WatchedCluster, cluster_class), {"records": records, "job_cls": job})


def words_of(error: Exception) -> str:
    """What the batch system has said: dask-jobqueue quotes the whole output of the command."""
    _, _, said = str(error).partition("stderr:\n")
    return " / ".join((said or str(error)).split("\n")).strip(" /")
