"""Workers in the jobs of a batch system, through dask-jobqueue. Jobs are watched until their workers connect."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import os
import re
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Scheduler
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface, SpecCluster
from distributed.diagnostics.plugin import SchedulerPlugin

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.client.cluster_view import DEFAULT_LOST, LOST_WORKER, Waiting, wait_for_workers
from dshuffle.runtime.settings import as_seconds

logger = logging.getLogger(__name__)

SYSTEMS = ("HTCondor", "LSF", "Moab", "OAR", "PBS", "SGE", "SLURM")
"""Batch systems of dask-jobqueue, as its classes begin."""

SOON = "5s"
"""Value of ``LOST_WORKER`` for batch jobs, unless the user has set another one. A nanny starts a worker again within
it. After it, a job whose worker was lost is submitted again."""

SUBMISSIONS = 3
"""How often a job is submitted in a row without a worker that connects."""

PAUSE = 60.0
"""Seconds until a job that the batch system has refused is submitted again. Its controller may be starting again."""

LOOK = 10.0
"""Seconds between two questions to Slurm, while jobs have no worker."""

ANSWER_WITHIN = 30.0
"""Seconds in which a command of Slurm must end. A busy controller lets it wait."""

LOG_LINES, LOG_BYTES = 20, 20_000
"""Lines of a log that an error quotes, and bytes at its end that are read for them."""


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
        if self.min_workers is not None and as_integer("min_workers", self.min_workers, 1) > workers:
            raise InvalidParameter.of("min_workers", self.min_workers, f"at most {workers}, the workers of all jobs")
        as_seconds("patience", self.patience)

    def __str__(self) -> str:
        return f"{self.n_workers} workers in {self.jobs} {self.system} jobs"

    @property
    def n_workers(self) -> int:
        """Number of workers to start with."""
        return self.min_workers or self.jobs * self._processes

    def _configured(self, option: str) -> Any:
        own = self.options.get(option.replace("-", "_"))
        section = self.options.get("config_name", self.system.lower())
        return dask.config.get(f"jobqueue.{section}.{option}", None) if own is None else own

    @property
    def _processes(self) -> Any:
        """Workers of a job. Dask-jobqueue's own default is several for a job of several cores."""
        return 1 if (processes := self._configured("processes")) is None else processes

    @property
    def awaited(self) -> tuple[int, str | float]:
        """Number of workers to wait for, and for how long."""
        return self.n_workers, self.patience

    @property
    def _options(self) -> dict[str, Any]:
        arguments = self._configured("worker-extra-args") or []
        # While a worker starts, it loads what the session would wait for.
        preload = [*arguments, "--preload", "dshuffle"]
        return {**self.options, "processes": self._processes, "worker_extra_args": preload}

    def check(self) -> None:
        """Check that dask-jobqueue is installed, and can write a job with the options."""
        cluster_class = cluster_class_of(self.system)
        of_cluster = inspect.signature(cluster_class.__mro__[1].__init__).parameters.keys() - {"config_name"}
        options = {name: value for name, value in self._options.items() if name not in of_cluster}
        try:
            cluster_class.job_cls("tcp://scheduler:0", name="check", **options).job_script()
        except (TypeError, ValueError, OSError, KeyError) as error:
            raise InvalidParameter.because("options", f"{cluster_class.__name__} refuses them: {error}") from error

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
                cluster = stack.enter_context(watched(cluster_class_of(self.system), records)(**self._options))
            except RuntimeError as error:
                raise ClusterError(f"the scheduler of the jobs cannot start: {error}", transient=False) from error
            stack.enter_context(JobWatch(cluster))
            cluster.adapt(minimum_jobs=self.jobs, maximum_jobs=self.jobs)
            client = stack.enter_context(Client(cluster))
            wait_for_workers(client, *self.awaited, waiting)
            yield client


def cluster_class_of(system: str) -> Any:
    """The class of dask-jobqueue for a batch system.

    The import sets a handler for SIGINT, so the first one must be in the main thread. It is set back, to keep Ctrl-C a
    KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        jobqueue = importlib.import_module("dask_jobqueue")
    except ImportError as error:
        raise InvalidParameter.because(
            "cluster", f"BatchJobs needs dask-jobqueue ({error})", "Install it: pip install dask-jobqueue"
        ) from error
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)
    [name] = [name for name in SYSTEMS if name.lower() == system.lower()]
    return getattr(jobqueue, f"{name}Cluster")


# -- what is known of the jobs -----------------------------------------------------------------------------------------


class State(StrEnum):
    """State of a job."""

    SUBMITTED = "submitted"  # the batch system has accepted it, and has said no more
    PENDING = "pending"
    RUNNING = "running"
    CONNECTED = "connected"
    LEFT = "ended"  # its worker was connected
    FAILED = "failed"  # it has ended before its worker connected
    REFUSED = "refused"


WITHOUT_WORKER = (State.SUBMITTED, State.PENDING, State.RUNNING)
"""States of jobs whose workers may still connect."""


@dataclass(slots=True)
class Job:
    """One job: its name in Dask, which stays if it is submitted again; its number in the batch system; its state, the
    reason in the words of the batch system, and since when; and its failures in a row without a worker.
    """

    name: str
    number: str
    state: State = State.SUBMITTED
    reason: str = ""
    since: float = 0.0
    failures: int = 0


class JobRecords:
    """All jobs of a cluster, and whether they can still have enough workers.

    ``lost_after`` are the seconds after which a job whose workers have all left is submitted again. Dask does this
    itself for jobs of one worker.
    """

    def __init__(
        self, system: str, jobs: int, processes: int, lost_after: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.system, self.jobs, self.processes, self._clock = system, jobs, processes, clock
        self._pauses = {State.FAILED: 0.0, State.REFUSED: PAUSE} | ({State.LEFT: lost_after} if processes > 1 else {})
        self._known: dict[str, Job] = {}
        self._any_connected = False

    def __str__(self) -> str:
        counts = Counter(
            f"{job.state} ({job.reason})" if job.reason and job.state == State.PENDING else str(job.state)
            for job in self.all()
            if job.state != State.CONNECTED
        )
        if failures := sum(job.failures for job in self.all()):
            counts["failures so far"] = failures
        texts = ", ".join(f"{count} {text}" for text, count in sorted(counts.items()))
        return texts and f"jobs: {texts}"

    def note(self, name: str, state: State, reason: str = "", number: str = "") -> None:
        """Record a state. The batch system accepts or refuses new jobs; workers that a user has started have no job."""
        if state in (State.SUBMITTED, State.REFUSED):
            self._known.setdefault(name, Job(name, name))
        if (job := self._known.get(name)) is None:
            return
        job.state, job.reason, job.since, job.number = state, reason, self._clock(), number or job.number
        if state == State.CONNECTED:
            job.failures, self._any_connected = 0, True
        elif state in (State.FAILED, State.REFUSED):
            job.failures += 1
            text = "dshuffle: %s job %s has %s before its worker had connected (attempt %d of %d): %s"
            what = "been refused" if state == State.REFUSED else state
            logger.warning(text, self.system, job.number, what, job.failures, SUBMISSIONS, reason)

    def due(self) -> list[str]:
        """Names of jobs that have failed, were refused or lost their workers, and are to be submitted again now."""
        return [
            job.name
            for job in self.all()
            if job.failures < SUBMISSIONS
            and job.state in self._pauses
            and self._clock() >= job.since + self._pauses[job.state]
        ]

    def check(self, n_workers: int) -> None:
        """Raise :class:`ClusterError` if so many workers cannot come any more.

        A refusal counts at once while no worker has connected. Later the controller may only be starting again.
        """
        lost = [
            job
            for job in self.all()
            if job.failures >= SUBMISSIONS or (job.state == State.REFUSED and not self._any_connected)
        ]
        if (most := (self.jobs - len(lost)) * self.processes) < n_workers:
            last = max(lost, key=lambda job: job.since)
            text = (
                f"{self.system} has {last.state} {len(lost)} of {self.jobs} jobs"
                if last.state == State.REFUSED
                else f"{len(lost)} of {self.jobs} jobs have failed {SUBMISSIONS} times before their workers connected"
            )
            text = f"{text}, so at most {most} of {n_workers} workers can come. The last one: {last.reason}"
            raise ClusterError(text, transient=False)

    def all(self) -> list[Job]:
        """The jobs of this moment: other threads read them."""
        return list(self._known.values())


# -- what tells it -----------------------------------------------------------------------------------------------------


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
            _, _, said = str(error).partition("stderr:\n")  # dask-jobqueue quotes the whole output
            words = " / ".join((said or str(error)).split("\n")).strip(" /")
            self.records.note(self.name, State.REFUSED, words)
            self.status = Status.running  # what Dask expects here; without a number there is nothing to cancel
        else:
            self.records.note(self.name, State.SUBMITTED, number=str(self.job_id))

    async def close(self) -> None:
        """Cancel the job."""
        await super().close()
        self.status = Status.closed  # dask-jobqueue leaves it as it was


class WatchedCluster(SpecCluster):
    """A base of cluster classes that knows the records of its jobs. Waits for workers ask for them."""

    records: JobRecords
    scheduler: Any

    def describe_jobs(self, n_workers: int) -> str:
        """How many jobs are in which state. Raises :class:`ClusterError` if so many workers cannot come any more."""
        self.records.check(n_workers)
        return str(self.records)


def watched(cluster_class: type[Any], records: JobRecords) -> type[WatchedCluster]:
    """A class of dask-jobqueue whose clusters and jobs write these records."""
    job_class = cluster_class.job_cls
    job = type(job_class.__name__, (WatchedJob, job_class), {"records": records})
    return type(cluster_class.__name__, (WatchedCluster, cluster_class), {"records": records, "job_cls": job})


class JobWatch(SchedulerPlugin):
    """Records the workers of jobs as they connect, asks Slurm about those that do not, and lets Dask submit jobs again.

    Of other batch systems, only refusals are known.
    """

    def __init__(self, cluster: WatchedCluster) -> None:
        self._cluster, self._records = cluster, cluster.records
        self._next_question = 0.0
        self._jobs: dict[str, str] = {}  # names of jobs by the addresses of their connected workers

    def __enter__(self) -> None:
        self._cluster.sync(self._start)

    def __exit__(self, *_: object) -> None:
        self._cluster.sync(self._stop)

    async def _start(self) -> None:
        self._cluster.scheduler.add_plugin(self, name="dshuffle-jobs")
        self._task = asyncio.ensure_future(self._watch())

    async def _stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._cluster.scheduler.remove_plugin("dshuffle-jobs")

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Record a worker that has connected. Dask-jobqueue numbers the workers of a job, if it has several."""
        name = str(scheduler.workers[worker].name)
        self._jobs[worker] = name if self._records.processes == 1 else name.rpartition("-")[0]
        self._records.note(self._jobs[worker], State.CONNECTED)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """Record a job whose last worker has left."""
        name = self._jobs.pop(worker)
        if name not in self._jobs.values():
            self._records.note(name, State.LEFT)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, LOOK))
            try:
                await self._look()
            except Exception:  # of Dask, while a job is closed
                logger.exception("dshuffle: looking at the jobs has failed")

    async def _look(self) -> None:
        jobs, records = self._cluster.workers, self._records
        for name in records.due():  # the cluster submits jobs that it does not have
            if (job := jobs.get(name)) is not None:
                await job.close()  # if this is cancelled, the cluster still has the job, and closes it
                if jobs.get(name) is job:
                    del jobs[name]
        waiting = [job for job in records.all() if job.state in WITHOUT_WORKER]
        if not waiting or records.system.lower() != "slurm" or time.monotonic() < self._next_question:
            return
        self._next_question = time.monotonic() + LOOK
        try:
            states = await slurm_states()
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("dshuffle: the states of the jobs are not known: %s", error)
            return
        for each in waiting:
            state, reason = states.get(each.number, (State.FAILED, ""))
            if state == State.FAILED:
                try:
                    reason = await slurm_ending(each.number)
                except (OSError, subprocess.SubprocessError) as error:
                    if each.number not in states and each.state == State.SUBMITTED:
                        continue  # perhaps it is on another cluster, of which nothing is known here
                    reason = f"Slurm does not say how it ended ({error})"
            if each.state in WITHOUT_WORKER and (each.state, each.reason) != (state, reason):  # its worker may be here
                records.note(each.name, state, reason)


# -- what Slurm says ---------------------------------------------------------------------------------------------------

BEGUN = {"COMPLETING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
QUEUED = {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD"}
"""States of ``squeue`` in which a job has begun and not ended, and in which it has not begun."""


async def slurm_states() -> dict[str, tuple[State, str]]:
    """State of each of this user's jobs, failed if it has ended, and the reason that Slurm gives.

    Slurm forgets jobs some minutes after their end (``MinJobAge``). Raises :class:`OSError` without an answer.
    """
    command = "squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%T|%r"
    rows = [line.split("|", 2) for line in (await _output(*command)).splitlines()]
    return {
        number: (
            State.RUNNING if name in BEGUN else State.PENDING if name in QUEUED else State.FAILED,
            "" if reason == "None" else reason,
        )
        for number, name, reason in rows
    }


async def slurm_ending(number: str) -> str:
    """How a job has ended, with the last lines of its log. Raises :class:`OSError` if that is unknown."""
    shown = await _output("scontrol", "--oneliner", "show", "job", number)
    fields = dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w/:]+=|\s*$)", shown))
    if not (user := fields.get("UserId", "")).endswith(f"({os.getuid()})"):
        raise OSError(f"scontrol: job {number} belongs to {user}")  # a job on another cluster may have the same number
    words = f"{fields.get('JobState', '')}, exit code {fields.get('ExitCode', '')}, on {fields.get('NodeList', '')}"
    log = Path(re.sub("%[jJA]", number, fields.get("StdErr", "")))  # Slurm 22 shows patterns of sbatch
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            lines = deque(file.read().decode(errors="replace").splitlines(), LOG_LINES)
    except OSError as error:
        return f"{words}. Its log {log} cannot be read here ({error.strerror})"
    return "\n    ".join([f"{words}. The end of its log {log}:", *filter(str.strip, lines)])


async def _output(*command: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, errors="replace", timeout=ANSWER_WITHIN, check=False
    )
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout
