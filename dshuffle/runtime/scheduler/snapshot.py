"""What a session measured and does: for clients, and as a page of the Dask dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module

from distributed import Scheduler
from tornado.web import RequestHandler

from dshuffle import units
from dshuffle.notebook import html_from
from dshuffle.planning import SERVER, get_delivery, name_of
from dshuffle.records import Measures, slow_rank_in_words
from dshuffle.runtime.messages import EpochExchange, Report
from dshuffle.runtime.scheduler.machine import Run, SessionMachine, total_of
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.units import human_seconds

logger = logging.getLogger(__name__)

CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""

KEPT = 200
"""Epochs that a session keeps measurements of."""

NOTHING = Report(measures=Measures(wire_sent_bytes=(0,), wire_received_bytes=(0,)))
"""The report of a participant that was lost."""


def next_rate(before: float | None, measured: float | None) -> float | None:
    """The rate for the next exchange. It falls by half at most, so that one slow exchange does not decide."""
    if before is None or measured is None:
        return measured or before
    return measured if math.isinf(before) else max(measured, before / 2)


def rate_of(measured: Iterable[Measures], cpu_idle: float) -> float | None:
    """Median rate of messages into a worker, in bytes per second; None if next to nothing was sent.

    If processors were the limit, links may be faster, and messages should be long: each of them costs processor time.
    """
    rates = [
        sum(measures.wire_received_bytes) / measures.transfer_seconds
        for measures in measured
        if sum(measures.wire_received_bytes) > TIMED_NBYTES and measures.transfer_seconds > 0
    ]
    if not rates:
        return None
    return statistics.median(rates) if cpu_idle >= CPU_BOUND else math.inf


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


class ExchangeLog:
    """The last exchanges of a session."""

    def __init__(self, n_workers: int) -> None:
        self.exchanges: deque[EpochExchange] = deque(maxlen=KEPT)
        self.links: tuple[LinkFigures, ...] = ()  # of the last exchange
        self.n_held: dict[int, int] = {}  # samples that each rank holds
        self.rate: float | None = None  # of links into workers, in bytes per second
        self.client_asked = 0.0  # when the client began to wait for the epoch
        self._n_workers = n_workers

    def add(
        self,
        run: Run,
        reports: Mapping[int, Report],
        participants: Iterable[int],
        delivery: str,
        addresses: dict[int, str],
    ) -> EpochExchange:
        """Add the exchange of a run, from the reports of the participants that have swapped to its epoch."""
        in_order = [reports.get(participant, NOTHING) for participant in participants]
        measured = [report.measures for report in in_order]
        measures = Measures.combined(measured)
        self.links = tuple(
            LinkFigures(receiver=name_of(receiver), sender=name_of(sender), nbytes=nbytes, seconds=seconds)
            for receiver, report in sorted(reports.items())
            for sender, (nbytes, seconds) in sorted(report.links.items())
        )
        self.n_held = {rank: report.held for rank, report in reports.items() if rank != SERVER}
        if not get_delivery(delivery).needs_server:
            self.rate = next_rate(self.rate, rate_of(measured, measures.cpu_idle))
        counts = run.votes.values()
        exchange = EpochExchange(
            epoch=run.epoch,
            run_id=run.run_id,
            delivery=delivery,
            needed=total_of(counts, "needed"),
            packets=total_of(counts, "packets"),
            components=total_of(counts, "expected"),
            exchange_seconds=run.ready_after,
            waited_seconds=max(0.0, run.started + run.ready_after - self.client_asked),
            measures=measures,
            addresses=addresses,
            training_before=tuple(report.training for report in in_order[: self._n_workers]),
        )
        self.exchanges.append(exchange)
        return exchange


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


def snapshot_of(
    spec: SessionSpec, machine: SessionMachine, log: ExchangeLog, addresses: Mapping[int, str], waiting_for: str
) -> SessionSnapshot:
    """What the coordinator of a session knows."""

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
    return SessionSnapshot(
        session_id=spec.session_id,
        way=spec.shuffle.choices.label,
        n_samples=spec.shuffle.n_samples,
        row_nbytes=spec.dataset.layout.nbytes,
        epoch=machine.epoch if machine.epoch >= machine.first_epoch else None,
        phase="ready" if machine.is_ready else machine.phase.name.lower(),
        waiting_for=waiting_for,
        participants=tuple(
            Participant(name=name_of(number), address=address, state=state(number), held=log.n_held.get(number))
            # The ranks by number, then the server.
            for number, address in sorted(addresses.items(), key=lambda item: (item[0] == SERVER, item[0]))
        ),
        epochs=epochs,
        links=log.links,
        slow_rank=slow_rank_in_words([each.rank_training_seconds for each in epochs if each.rank_training_seconds]),
    )


Snapshots = Callable[[], list[SessionSnapshot]]


class OpenSessions(RequestHandler):
    """All open sessions, in a form."""

    def initialize(self, snapshots: Snapshots, form: Callable[..., str]) -> None:
        """Keep the function that returns them, and what writes them."""
        self.snapshots, self.form = snapshots, form

    async def get(self) -> None:
        """Answer a request."""
        if self.request.path.endswith("json"):
            self.set_header("Content-Type", "application/json")
        self.write(await asyncio.to_thread(self.form, sessions=self.snapshots()))


def _json(sessions: list[SessionSnapshot]) -> str:
    return json.dumps([*map(asdict, sessions)])


def add_page(scheduler: Scheduler, snapshots: Snapshots) -> None:
    """Add the page to a scheduler's dashboard if it has one, and the JSON to its HTTP server in any case."""
    try:
        served = scheduler.http_application
        prefix = next((page.prefix for page in served.applications if hasattr(page, "prefix")), None)
        forms: dict[str, Callable[..., str]] = {".json": _json}
        if prefix is not None:  # only the dashboard's application has one: no need to import Bokeh to find out
            variables = import_module("distributed.dashboard.scheduler").template_variables(scheduler)
            variables["plots"].append({"url": "dshuffle", "name": "dshuffle"})  # the menu "More..." of all pages
            layout = import_module("distributed.dashboard.components.scheduler").env.get_template("base.html")
            forms[""] = partial(html_from, "page", layout=layout, **variables)
        for ending, form in forms.items():
            route = f"{prefix or ''}/dshuffle{ending}", OpenSessions, {"snapshots": snapshots, "form": form}
            served.add_handlers(r".*", [route])
    except Exception:  # training must not depend on it
        logger.warning("dshuffle: its page could not be added to the dashboard", exc_info=True)
