"""Measurements as frozen records that can be written as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Self

import numpy as np

from dshuffle.notebook import html_summary
from dshuffle.planning.planner import Choices
from dshuffle.planning.randomness import DRAW_VERSION
from dshuffle.planning.shares import MEASURED_EPOCHS, fractions_of
from dshuffle.units import human_bytes, human_count, human_seconds


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """Cost of reads from a store.

    ``requests`` that the store answered, one per chunk or, where the format allows it, per part of a chunk, and
    ``retries`` of them after a transient error; ``fetched_bytes`` as stored (compressed), ``delivered_bytes`` of rows
    to the caller, and wall time, in which concurrent reads of one call count once.
    """

    requests: int = 0
    fetched_bytes: int = 0
    delivered_bytes: int = 0
    seconds: float = 0.0
    retries: int = 0

    def __add__(self, other: StoreTraffic) -> StoreTraffic:
        return StoreTraffic(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __sub__(self, other: StoreTraffic) -> StoreTraffic:
        return StoreTraffic(*map(operator.sub, dataclasses.astuple(self), dataclasses.astuple(other)))


def joined(values: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The values of all members that have a rank, in rank order."""
    return tuple(chain(*values))


def _measure(unit: str, combine: Callable[[Iterable[Any]], Any], default: Any = 0) -> Any:
    return dataclasses.field(default=default, metadata={"unit": unit, "combine": combine})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What one member of a session measured of an exchange, or what all of them measured together.

    Each field has in its metadata the unit, and how the values of all members are combined. Adding a figure means
    adding a field here and setting it where it is measured.

    Parameters
    ----------
    wire_sent_bytes, wire_received_bytes
        Bytes of messages between workers, by rank (rows or packets, and their checksums): the workers' egress, without
        what the server beside a rank sends, and their ingress. Of one member a single value; none of a dedicated
        server. They crossed the network, unless they passed through shared memory.
    server_sent_bytes
        Bytes that the server sent: its egress.
    metadata_bytes
        Bytes of messages that are not rows or packets: their checksums. Plans do not cross the network.
    shared_memory_bytes
        Bytes sent between workers of the same host through memory that they share, in place of the network.
    recovered_rows
        Rows read from the store because their sender could not deliver them, delivered them corrupted, or was slow.
    store_requests, store_bytes, store_delivered_bytes
        Requests, bytes fetched and bytes of rows delivered by the store.
    store_retries
        Requests that were repeated after a transient error.
    plan_seconds
        Making the plan.
    gather_seconds
        Packing outgoing rows, or encoding packets.
    transfer_seconds
        Waiting for messages.
    scatter_seconds
        Unpacking and verifying rows, or decoding packets.
    store_seconds
        Reading from the store.
    commit_seconds
        Swapping to the next epoch.
    encode_seconds, decode_seconds
        The parts of gathering and scattering that the server spent on encoding packets and the slowest worker on
        decoding them. Sums over the threads of a process.
    watched_seconds
        Time from the start of the exchange until this member had finished.
    cpu_idle
        Share of the processors' time that was idle meanwhile, in [0, 1], on the busiest host. Time that other virtual
        machines took counts as busy.
    """

    wire_sent_bytes: tuple[int, ...] = _measure("bytes", joined, ())
    wire_received_bytes: tuple[int, ...] = _measure("bytes", joined, ())
    server_sent_bytes: int = _measure("bytes", sum)
    metadata_bytes: int = _measure("bytes", sum)
    shared_memory_bytes: int = _measure("bytes", sum)
    recovered_rows: int = _measure("rows", sum)
    store_requests: int = _measure("requests", sum)
    store_bytes: int = _measure("bytes", sum)
    store_delivered_bytes: int = _measure("bytes", sum)
    store_retries: int = _measure("requests", sum)
    plan_seconds: float = _measure("seconds", max, 0.0)
    gather_seconds: float = _measure("seconds", max, 0.0)
    transfer_seconds: float = _measure("seconds", max, 0.0)
    scatter_seconds: float = _measure("seconds", max, 0.0)
    store_seconds: float = _measure("seconds", max, 0.0)
    commit_seconds: float = _measure("seconds", max, 0.0)
    encode_seconds: float = _measure("seconds", max, 0.0)
    decode_seconds: float = _measure("seconds", max, 0.0)
    watched_seconds: float = _measure("seconds", max, 0.0)
    cpu_idle: float = _measure("fraction", min, 1.0)

    @classmethod
    def combined(cls, measures: Sequence[Measures]) -> Measures:
        """What all members measured, from what each did; members with a rank first, in rank order.

        Examples
        --------
        >>> one = Measures(wire_sent_bytes=(10,), store_requests=1, plan_seconds=0.5, watched_seconds=1.0, cpu_idle=0.5)
        >>> two = Measures(wire_sent_bytes=(20,), store_requests=2, plan_seconds=0.1, watched_seconds=0.9, cpu_idle=0.2)
        >>> both = Measures.combined([one, two])
        >>> both.wire_sent_bytes, both.store_requests, both.plan_seconds, both.cpu_idle
        ((10, 20), 3, 0.5, 0.2)
        """
        # A member that finished long before the others saw too little of the exchange: a server that sends nothing
        # watches for some milliseconds, all of them busy with planning.
        longest = max(record.watched_seconds for record in measures)
        watchers = [record for record in measures if record.watched_seconds >= longest / 2]
        return Measures(
            **{
                entry.name: entry.metadata["combine"](
                    getattr(record, entry.name) for record in (watchers if entry.name == "cpu_idle" else measures)
                )
                for entry in dataclasses.fields(Measures)
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """What :meth:`to_dict` wrote, after it has travelled as JSON or between processes."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EpochRecord(Measures):
    """Traffic and times of one epoch.

    It has the fields of :class:`Measures`, combined over all members, and those below. The time of a phase is that of
    the slowest worker. Phases overlap, so they do not add up to ``exchange_seconds``.

    Parameters
    ----------
    epoch, run_id
        Epoch (from 0) and the attempt that was committed.
    choices
        The way of shuffling, with arrays by name; for ``"auto"`` with the delivery that this epoch used.
    n_workers, n_samples, row_nbytes
        Numbers of workers and samples, and bytes of a sample.
    broadcast_samples
        Number of samples, among ``n_samples``, that all workers hold and train on. They are never exchanged.
    needed
        Number of samples that a worker had to train on but did not hold.
    packets
        Number of packets of the plan; for an uncoded delivery, the number of samples.
    components
        Number of samples in all packets: the needed samples, and a few that only help to decode others.
    server
        ``"dedicated"``, ``"beside rank K"`` if worker K also serves, or ``""`` without a server.
    exchange_seconds
        Time from the start of the exchange to all workers being ready.
    training_seconds
        Total time of this epoch's tasks on the worker where it is longest.
    rank_training_seconds
        Total time of this epoch's tasks on each rank, without the time in which they waited for other ranks: what the
        trainers know of it, and what tasks say (:meth:`dshuffle.Partition.note_waiting`).
    waited_seconds
        Time that training waited for the data of this epoch.
    epoch_seconds
        Wall time from when the client asks for this epoch until its tasks have ended and the client has asked for the
        next one: waiting, training, and what the client does between the tasks, such as averaging.
    draw_version
        Version of the random draws of the release that wrote the record.
    first_epoch
        First epoch of the session, whose samples are loaded: from the store, from the workers before, or from a disk.
    weights
        Relative share of each rank, in thousandths of the largest one; empty if shares are equal.
    trained_before
        Number of samples on which earlier sessions trained in this epoch, according to the state from which this
        session resumed. It trains on all others, also on those that they trained on after the state was taken.
    """

    epoch: int
    run_id: int
    choices: Choices
    n_workers: int
    n_samples: int
    row_nbytes: int
    needed: int
    packets: int
    components: int
    server: str
    exchange_seconds: float
    training_seconds: float
    waited_seconds: float
    epoch_seconds: float = 0.0
    broadcast_samples: int = 0
    draw_version: int = DRAW_VERSION
    first_epoch: int = 0
    trained_before: int = 0
    rank_training_seconds: tuple[float, ...] = ()
    weights: tuple[int, ...] = ()

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"<EpochRecord {self.epoch}: {self.choices.label}; {figures}>"

    def _repr_html_(self) -> str:
        return html_summary(f"Epoch {self.epoch}: {self.choices.label}", self._figures())

    def _figures(self) -> dict[str, str]:
        """What a person wants to see first."""
        return {
            "workers": str(self.n_workers),
            "delivery": self.delivery,
            "samples received": human_count(self.needed),
            "bytes sent": human_bytes(self.wire_bytes),
            "bytes read": human_bytes(self.store_bytes),
            "exchange": human_seconds(self.exchange_seconds),
            "training": human_seconds(self.training_seconds),
            "waited": human_seconds(self.waited_seconds),
        }

    @property
    def loaded(self) -> bool:
        """Whether this is the first epoch of its session, whose samples are loaded whatever the delivery."""
        return self.epoch == self.first_epoch

    @property
    def delivery(self) -> str:
        """The delivery that this epoch used; ``"load"`` for the first epoch, ``"none"`` for one between exchanges."""
        between = not self.choices.exchange_epochs.has_exchange(self.epoch)
        return "load" if self.loaded else "none" if between else self.choices.delivery

    @property
    def exchanged(self) -> bool:
        """Whether samples could change workers for this epoch: not in the first one, nor between exchanges."""
        return not self.loaded and self.choices.has_exchange(self.epoch)

    @property
    def reads_store(self) -> bool:
        """Whether this epoch's samples came from the store."""
        return self.loaded or (self.choices.reads_store and self.delivery != "none")

    @property
    def relay(self) -> str:
        """Relay of the packets that combine several samples; ``""`` if there were none."""
        return self.choices.relay if not self.loaded and self.components != self.packets else ""

    @property
    def cache_fraction(self) -> float:
        """Fraction of the samples that each worker held."""
        chosen = self.choices.cache_fraction
        return 1 / self.n_workers if chosen is None else chosen

    @property
    def coded_load_bytes(self) -> int:
        """``packets * row_nbytes``, which is what the papers count; 0 for the first epoch."""
        return 0 if self.loaded else self.packets * self.row_nbytes

    @property
    def mean_degree(self) -> float:
        """Mean number of samples in a packet; 0 without packets."""
        return self.components / max(1, self.packets)

    @property
    def wire_bytes(self) -> int:
        """Total bytes of the messages that workers received from others."""
        return sum(self.wire_received_bytes)

    @property
    def read_amplification(self) -> float | None:
        """Bytes fetched from the store per byte of rows returned; None if nothing was read."""
        return self.store_bytes / self.store_delivered_bytes if self.store_delivered_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, and for readers of JSON what follows from them: ``delivery``, ``relay``, and so on."""
        choices = self.choices.to_dict()
        fields = {**Measures.to_dict(self), "choices": choices}
        copied = {name: choices[name] for name in ("assignment", "caching", "sharding", "balance")}
        return {**copied, **{name: getattr(self, name) for name in _DERIVED}, **fields}

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record written by :meth:`to_json`."""
        parsed = json.loads(line)
        fields = {entry.name: parsed[entry.name] for entry in dataclasses.fields(cls)}
        return cls.from_dict({**fields, "choices": Choices.from_dict(fields["choices"])})


_DERIVED = ("delivery", "exchanged", "relay", "cache_fraction", "coded_load_bytes")


SLOW, NOTICEABLE = 1.5, 0.1
"""A rank is slow if its training takes so many times as long as the median of the others, and so many seconds more."""

LISTED_RANKS = 8
"""Ranks up to which all shares are listed."""

LEAST_EPOCHS = MEASURED_EPOCHS + 2
"""Epochs of the shortest run in which measured shares change. An exchange with the former shares is under way when the
last measured epoch ends."""


def slow_rank_of(records: Sequence[EpochRecord]) -> str:
    """Say how much longer the slowest rank trained than the others with the last shares, and how long they waited."""
    known = [(record.weights, record.rank_training_seconds) for record in records if record.rank_training_seconds]
    like = [(len(seconds), weights) for weights, seconds in known]
    return slow_rank_in_words([seconds for shares, (_, seconds) in zip(like, known, strict=True) if shares == like[-1]])


def slow_rank_in_words(epochs: Sequence[Sequence[float]]) -> str:
    """Say how much longer the slowest rank trained than the others, from the seconds of each rank in each epoch."""
    counted = epochs[1:] or epochs
    if not counted or len(counted[0]) < 2:
        return ""
    seconds = np.median(counted, axis=0)
    rank = seconds.argmax()
    middle = np.median(np.delete(seconds, rank))
    wait = seconds[rank] - middle
    if wait < NOTICEABLE or seconds[rank] < SLOW * middle:
        return ""
    times = f"{seconds[rank] / middle:.1f} times as long as the median of the others" if middle > 0 else "longest"
    return f"rank {rank} trained {times}, which waited {human_seconds(wait)} an epoch"


def shares_in_words(records: Sequence[EpochRecord]) -> str:
    """Say which part of the samples each rank had in the last epoch, and from which epoch on."""
    if not records or (last := records[-1]).choices.shares.is_even:
        return ""
    if not last.weights:
        n_epochs, why = sum(record.first_epoch == last.first_epoch for record in records), ""
        if last.choices.shares.measures and n_epochs < LEAST_EPOCHS:
            epochs = "1 epoch is" if n_epochs == 1 else f"{n_epochs} epochs are"
            why = f", because {epochs} too few to measure them; {LEAST_EPOCHS} are needed"
        return f"shares: equal{why}"
    fractions = enumerate(fractions_of(last.weights, last.n_workers))
    sizes = [f"{100 * fraction:.1f} % (rank {rank})" for rank, fraction in fractions]
    text = ", ".join(sizes)
    if last.n_workers > LISTED_RANKS:
        text = " to ".join(sizes[last.weights.index(choose(last.weights))] for choose in (min, max))
    equal = takewhile(lambda record: record.weights == last.weights, reversed(records))  # earlier equals do not count
    first = min(record.epoch for record in equal)
    return f"shares{f' since epoch {first}' if first > records[0].epoch else ''}: {text}"
