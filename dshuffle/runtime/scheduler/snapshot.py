"""What a session does at a moment, and what its last epochs took: for the dashboard, its JSON and Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dshuffle.planning import name_of
from dshuffle.runtime.messages import EpochExchange, Report, TrainingTime

KEPT = 200
"""Epochs that a session keeps measurements of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """What an epoch took.

    Parameters
    ----------
    epoch
        Number of the epoch.
    delivery
        Delivery of its exchange.
    exchange_seconds, waited_seconds
        Time of the exchange, and how long the client waited for it.
    training_seconds
        Time of the tasks, on the worker where it is longest; None while the epoch lasts.
    rank_training_seconds
        Time of the tasks on each rank, without the time in which they waited for other ranks; empty while the epoch
        lasts.
    sent_bytes, received_bytes
        Bytes of messages of each worker, in rank order.
    server_sent_bytes, store_bytes
        Bytes that the server sent, and bytes that all workers read from the store.
    """

    epoch: int
    delivery: str
    exchange_seconds: float
    waited_seconds: float
    training_seconds: float | None
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    server_sent_bytes: int
    store_bytes: int
    rank_training_seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, exchange: EpochExchange, training: Sequence[TrainingTime] | None = None) -> EpochFigures:
        """The figures of an epoch, from its exchange and the training of each rank, once that has ended."""
        measures = exchange.measures
        return cls(
            epoch=exchange.epoch,
            delivery=exchange.delivery,
            exchange_seconds=exchange.exchange_seconds,
            waited_seconds=exchange.waited_seconds,
            training_seconds=None if training is None else max((rank.seconds for rank in training), default=0.0),
            rank_training_seconds=tuple(rank.own for rank in training or ()),
            sent_bytes=measures.wire_sent_bytes,
            received_bytes=measures.wire_received_bytes,
            server_sent_bytes=measures.server_sent_bytes,
            store_bytes=measures.store_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A participant of a session.

    ``state`` is ``"lost"`` while another worker is looked for, ``"exchanging"`` until it has all of its samples of the
    next epoch, and otherwise ``"ready"``. ``held`` is the number of samples whose rows it holds in the current epoch;
    None before the first one, and for a server.
    """

    name: str
    address: str
    state: str
    held: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What one participant received from another one in an exchange, from its first request to the last answer."""

    receiver: str
    sender: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def links_of(reports: Mapping[int, Report]) -> tuple[LinkFigures, ...]:
    """The links of an exchange, from what participants reported with the commit."""
    return tuple(
        LinkFigures(receiver=name_of(receiver), sender=name_of(sender), nbytes=nbytes, seconds=seconds)
        for receiver, report in sorted(reports.items())
        for sender, (nbytes, seconds) in sorted(report.links.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session at a moment.

    ``epoch`` is None before the first epoch of the session. ``links`` are those of the last exchange, if there are not
    too many workers. ``slow_rank`` says in words which rank the others wait for; it is empty if there is none.
    """

    session_id: str
    way: str
    n_samples: int
    row_nbytes: int
    epoch: int | None
    phase: str
    waiting_for: str
    participants: tuple[Participant, ...]
    epochs: tuple[EpochFigures, ...]
    links: tuple[LinkFigures, ...] = ()
    slow_rank: str = ""

    def progress(self) -> str:
        """The epoch and the phase, in words."""
        return f"{'before its first epoch' if self.epoch is None else f'epoch {self.epoch}'}, {self.phase}"


def figures_of(log: Sequence[EpochExchange]) -> tuple[EpochFigures, ...]:
    """Figures of the epochs of a log; what an epoch's training took is known when the next one begins."""
    return tuple(map(EpochFigures.of, log, [*(exchange.training_before or () for exchange in log[1:]), None]))
