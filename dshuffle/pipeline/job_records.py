"""What is known of the jobs of a pipeline until their workers connect: who waits, who runs, and who has failed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from dshuffle.errors import ClusterError

logger = logging.getLogger(__name__)

SUBMISSIONS = 3
"""How often a job is submitted in a row without a worker that connects."""

PAUSE = 60.0
"""Seconds until a job that the batch system has refused is submitted again. Its controller may be starting again."""


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
"""States in which a worker may come by itself."""


@dataclass(slots=True)
class JobRecord:
    """One job.

    Parameters
    ----------
    name
        Name of the job in Dask. It stays the same if the job is submitted again.
    number
        Number of the job in the batch system; empty if that has refused it.
    state
        Its state.
    reason
        Why it is in this state, in the words of the batch system.
    failures
        How often it was submitted in a row without a worker that connected.
    since
        When its state was recorded.
    """

    name: str
    number: str = ""
    state: State = State.SUBMITTED
    reason: str = ""
    failures: int = 0
    since: float = 0.0


class JobRecords:
    """All jobs of a cluster, and whether they can still have enough workers.

    Parameters
    ----------
    system
        Name of the batch system.
    jobs
        Number of jobs.
    processes
        Workers of a job.
    lost_after
        Seconds after which a job whose workers have all left is submitted again. Dask does this itself for jobs of one
        worker.
    clock
        Returns seconds.

    Examples
    --------
    >>> records = JobRecords("SLURM", jobs=2, processes=1)
    >>> records.submitted("a", "17")
    >>> records.seen("17", State.PENDING, "Resources")
    >>> records.submitted("b", "18")
    >>> print(records)
    1 job pending (Resources), 1 submitted
    """

    def __init__(
        self,
        system: str,
        jobs: int,
        processes: int,
        lost_after: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system, self._jobs, self._processes, self._clock = system, jobs, processes, clock
        self._pauses = {State.FAILED: 0.0, State.REFUSED: PAUSE}
        if processes > 1:
            self._pauses[State.LEFT] = lost_after
        self._records: dict[str, JobRecord] = {}
        self._any_connected = False

    def __str__(self) -> str:
        counts: Counter[str] = Counter()
        for record in self._all():
            if record.state != State.CONNECTED:
                reason = f" ({record.reason})" if record.reason and record.state == State.PENDING else ""
                counts[f"{record.state}{reason}"] += 1
        texts = [f"{count} {text}" for text, count in sorted(counts.items())]
        if texts:
            count, _, text = texts[0].partition(" ")
            texts[0] = f"{count} {'job' if count == '1' else 'jobs'} {text}"
        if failures := sum(record.failures for record in self._all()):
            texts.append(f"{failures} failures so far")
        return ", ".join(texts)

    # -- what happens --------------------------------------------------------------------------------------------------

    def submitted(self, name: str, number: str) -> None:
        """The batch system has accepted a job."""
        self._change(self._record(name), State.SUBMITTED, number=number)

    def refused(self, name: str, words: str) -> None:
        """The batch system has refused a job."""
        record = self._record(name)
        record.failures += 1
        self._change(record, State.REFUSED, words)
        logger.warning("dshuffle: %s has refused job %s. %s: %s", self._system, name, self._outlook(record), words)

    def connected(self, name: str) -> None:
        """A worker of a job has connected. Workers that a user has started are not recorded."""
        if (record := self._records.get(name)) is not None:
            record.failures, self._any_connected = 0, True
            self._change(record, State.CONNECTED, number=record.number)

    def left(self, name: str) -> None:
        """The last worker of a job has left."""
        if (record := self._records.get(name)) is not None:
            self._change(record, State.LEFT, number=record.number)

    def seen(self, number: str, state: State, reason: str = "") -> None:
        """The batch system has said that a job is pending or running."""
        for record in self.without_worker():
            if record.number == number and (record.state, record.reason) != (state, reason):
                self._change(record, state, reason, number)

    def was_seen(self, number: str) -> bool:
        """Whether the batch system has said that a job without a worker is pending or running."""
        return any(record.number == number and record.state != State.SUBMITTED for record in self.without_worker())

    def ended(self, number: str, words: str) -> None:
        """The batch system has said that a job has ended. If its worker had not connected, the job has failed."""
        for record in self.without_worker():
            if record.number == number:
                record.failures += 1
                self._change(record, State.FAILED, words, number)
                text = "dshuffle: %s job %s has ended before its worker had connected. %s: %s"
                logger.warning(text, self._system, number, self._outlook(record), words)

    # -- what follows --------------------------------------------------------------------------------------------------

    def without_worker(self) -> list[JobRecord]:
        """Jobs that the batch system has accepted, and whose workers have not connected."""
        return [record for record in self._all() if record.state in WITHOUT_WORKER]

    def due(self) -> list[JobRecord]:
        """Jobs that have failed, were refused or lost their workers, and are to be submitted again now."""
        now = self._clock()
        return [
            record
            for record in self._all()
            if record.failures < SUBMISSIONS
            and record.state in self._pauses
            and now >= record.since + self._pauses[record.state]
        ]

    def check(self, n_workers: int) -> None:
        """Check that a number of workers can still come.

        A refusal counts at once while no worker has connected. Later the controller may only be starting again.

        Raises
        ------
        ClusterError
            If too many jobs were refused or have failed too often.
        """
        lost = [
            record
            for record in self._all()
            if record.failures >= SUBMISSIONS or (record.state == State.REFUSED and not self._any_connected)
        ]
        most = (self._jobs - len(lost)) * self._processes
        if most >= n_workers:
            return
        last = max(lost, key=lambda record: record.since)
        if last.state == State.REFUSED:
            what = f"{self._system} has refused {len(lost)} of {self._jobs} jobs"
        else:
            what = f"{len(lost)} of {self._jobs} jobs have ended {SUBMISSIONS} times before their workers had connected"
        raise ClusterError(
            f"{what}, so at most {most} of {n_workers} workers can come. The last one: {last.reason}", transient=False
        )

    def _outlook(self, record: JobRecord) -> str:
        if record.failures >= SUBMISSIONS:
            return f"It is not submitted again after {SUBMISSIONS} attempts"
        attempt = f"(attempt {record.failures + 1} of {SUBMISSIONS})"
        if record.state == State.REFUSED:
            return f"If there are enough workers without it, it is submitted again in {PAUSE:g} s {attempt}"
        return f"It is submitted again now {attempt}"

    def _record(self, name: str) -> JobRecord:
        return self._records.setdefault(name, JobRecord(name))

    def _all(self) -> list[JobRecord]:
        return list(self._records.values())  # of one moment: other threads read this

    def _change(self, record: JobRecord, state: State, reason: str = "", number: str = "") -> None:
        record.state, record.reason, record.number, record.since = state, reason, number, self._clock()
