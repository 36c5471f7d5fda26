"""What a session does at a moment, and what its last epochs took: as JSON, as HTML and in words."""

from __future__ import annotations

from dataclasses import dataclass

from dshuffle import units
from dshuffle.notebook import html_from
from dshuffle.planning import SERVER, name_of
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.exchange_log import LinkFigures
from dshuffle.slow_rank import slow_rank_in_words
from dshuffle.units import human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """What an epoch took.

    ``training_seconds`` is the time of the tasks on the worker where it is longest; None while the epoch lasts.
    ``rank_training_seconds`` leaves out what tasks waited for other ranks. ``sent_bytes`` and ``received_bytes`` are
    in rank order, without what the server sent.
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

    def in_words(self) -> str:
        """The times, and the delivery."""
        times = f"training {human_seconds(self.training_seconds)}, waiting {human_seconds(self.waited_seconds)}, "
        return f"{times}exchange {human_seconds(self.exchange_seconds)} ({self.delivery})"


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

    def details(self) -> str:
        """What the session waits for, what the last epoch took, and which rank is slow, in words."""
        ended = [epoch for epoch in self.epochs if epoch.training_seconds is not None][-1:]
        words = [f"epoch {epoch.epoch}: {epoch.in_words()}" for epoch in ended] + [self.slow_rank]
        return "; ".join([f", {self.waiting_for}" if self.waiting_for else "", *filter(None, words)])

    def _repr_html_(self) -> str:
        links = {(link.receiver, link.sender): link for link in self.links}
        return html_from("session", session=self, links=links, units=units)


def snapshot_of(session_id: str, coordinator: Coordinator) -> SessionSnapshot:
    """What the coordinator of a session knows."""
    spec, machine, log = coordinator.members.spec, coordinator.machine, coordinator.log

    def state(participant: int) -> str:
        lost = participant in machine.unsettled
        return "lost" if lost else "exchanging" if machine.owes_rows(participant) else "ready"

    # What an epoch's training took is known when the next one begins.
    training = [*(exchange.training_before or () for exchange in list(log.exchanges)[1:]), None]
    epochs = tuple(
        EpochFigures(
            epoch=exchange.epoch,
            delivery=exchange.delivery,
            exchange_seconds=exchange.exchange_seconds,
            waited_seconds=exchange.waited_seconds,
            training_seconds=None if ranks is None else max((rank.seconds for rank in ranks), default=0.0),
            rank_training_seconds=tuple(rank.own for rank in ranks or ()),
            sent_bytes=exchange.measures.wire_sent_bytes,
            received_bytes=exchange.measures.wire_received_bytes,
            server_sent_bytes=exchange.measures.server_sent_bytes,
            store_bytes=exchange.measures.store_bytes,
        )
        for exchange, ranks in zip(log.exchanges, training, strict=False)
    )
    # The ranks by number, then the server.
    addresses = sorted(coordinator.addresses.items(), key=lambda item: (item[0] == SERVER, item[0]))
    return SessionSnapshot(
        session_id=session_id,
        way=spec.shuffle.choices.label,
        n_samples=spec.shuffle.n_samples,
        row_nbytes=spec.dataset.layout.nbytes,
        epoch=machine.epoch if machine.epoch >= machine.first_epoch else None,
        phase=machine.phase.name.lower(),
        waiting_for=coordinator.waiting_for(),
        participants=tuple(
            Participant(name=name_of(number), address=address, state=state(number), held=log.n_held.get(number))
            for number, address in addresses
        ),
        epochs=epochs,
        links=log.links,
        slow_rank=slow_rank_in_words([each.rank_training_seconds for each in epochs if each.rank_training_seconds]),
    )
