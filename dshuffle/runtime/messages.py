"""Messages between clients, the scheduler and workers. :mod:`.message_fields` says how they travel."""

from __future__ import annotations

from dataclasses import dataclass, field

from dshuffle.planning import WorkerHistory
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.records import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a participant counted in a run. The scheduler checks that the counts of all participants fit together.

    Parameters
    ----------
    digest
        Digest of what the plan depends on, the same for all.
    needed, packets, expected
        Samples that have to move, packets that carry them, and rows in these packets. They are sums over all workers,
        or those of one worker that planned its own part.
    leaving, arriving
        Rows that a worker which planned its own part sends to others, and receives from others. Otherwise None.
    rows
        Rows that have arrived.
    drawn, due
        Digest of the samples that the worker will train on, and its part of the digest of all samples that are due.
        None for a server.
    """

    digest: int
    needed: int = 0
    packets: int = 0
    expected: int
    leaving: int | None = None
    arriving: int | None = None
    rows: int
    drawn: SampleDigest | None = None
    due: SampleDigest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Whether a participant is ready to swap to the epoch of a run.

    Parameters
    ----------
    reason
        Why it is not; None if it is.
    again
        Whether another run can succeed.
    counts
        What it counted; None if it has no plan.
    """

    reason: str | None = None
    again: bool = False
    counts: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """What a participant says of its state, in case an order or a vote was lost.

    Parameters
    ----------
    open
        Whether the session is open there.
    epoch
        The epoch whose partition it holds; None if it holds none yet.
    run_id
        Number of the last run that has begun there.
    arrived
        Fraction of the run's rows that have arrived, if it is known.
    vote
        Its vote on the run, once it has one.
    """

    open: bool
    epoch: int | None = None
    run_id: int = 0
    arrived: float | None = None
    vote: Vote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """Time of a rank's tasks in an epoch.

    Parameters
    ----------
    seconds
        Total time of the tasks.
    waiting
        The part of it in which tasks waited for other ranks, for example to average gradients.
    """

    seconds: float = 0.0
    waiting: float = 0.0

    @property
    def own(self) -> float:
        """Seconds that depend on this rank alone."""
        return max(0.0, self.seconds - self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a participant measured in the exchange that it has committed.

    Parameters
    ----------
    measures
        Traffic and times of the exchange.
    training
        Time of training in the epoch that has ended.
    links
        Sender -> bytes that came from it over the network, and seconds in which they came.
    held
        Samples that it holds.
    """

    measures: Measures
    training: TrainingTime = TrainingTime()
    links: dict[int, tuple[int, float]] = field(default_factory=dict)
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReply:
    """The answer to a commit: a report, or what the swap still waits for."""

    report: Report | None = None
    busy: str | None = None


Answer = MemberState | CommitReply | None
"""What a participant answers to an order of the session machine; nothing if the order only has to be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that has been opened for a client.

    Parameters
    ----------
    addresses
        Address of every rank, and of the server.
    server
        Role of the server: ``"dedicated"``, ``"beside rank R"``, or empty.
    left_out
        Paused workers that do not take part.
    history
        Number of workers, and how it has changed.
    too_few_files
        What to do about workers that may not have enough open files; empty if all may.
    """

    addresses: dict[int, str]
    server: str
    left_out: tuple[str, ...]
    history: WorkerHistory
    too_few_files: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochExchange:
    """What the exchange for an epoch moved and took, and the training of the epoch before.

    Parameters
    ----------
    epoch, run_id, delivery
        The epoch, the run that succeeded, and its delivery.
    needed, packets, components
        Samples that had to move, packets that carried them, and rows in these packets.
    exchange_seconds, waited_seconds
        Time of the exchange, and how long the client waited for it.
    measures
        What all participants measured.
    addresses
        Address of every rank, and of the server.
    training_before
        Time of training in the epoch before, by rank; None if it is not known.
    """

    epoch: int
    run_id: int
    delivery: str
    needed: int
    packets: int
    components: int
    exchange_seconds: float
    waited_seconds: float
    measures: Measures
    addresses: dict[int, str]
    training_before: tuple[TrainingTime, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChanges:
    """How the workers of a cluster differ from the members of a session.

    Parameters
    ----------
    joined
        Workers that could train and are not members.
    leaving
        Members that have left or are about to leave.
    n_available
        Number of workers that could train.
    adopted
        Ranks whose workers have another rank as well.
    """

    joined: tuple[str, ...]
    leaving: tuple[str, ...]
    n_available: int
    adopted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSamples:
    """How many samples of the current epoch each rank has trained on, and the digest of all of these."""

    epoch: int
    counts: tuple[int, ...]
    digest: SampleDigest


@dataclass(frozen=True, slots=True)
class UnfinishedTask:
    """A task that has ended without finishing: the number of its call, its rank, and what became of it."""

    call: int
    rank: int
    outcome: str
