"""What a session measured and does: for clients, and as a page of the Dask dashboard."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from distributed import Scheduler
from tornado.web import RequestHandler

from dshuffle import units
from dshuffle.notebook import html_from
from dshuffle.planning import SERVER, get_delivery, name_of
from dshuffle.records import Measures, slow_rank_in_words
from dshuffle.runtime.messages import EpochExchange, Report, TrainingTime
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


class ExchangeLog:
    """The last exchanges of a session."""

    def __init__(self, n_workers: int) -> None:
        self.exchanges: deque[EpochExchange] = deque(maxlen=KEPT)
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
    ) -> None:
        """Add the exchange of a run, from the reports of the participants that have swapped to its epoch."""
        in_order = [reports.get(participant, NOTHING) for participant in participants]
        measured = [report.measures for report in in_order]
        measures = Measures.combined(measured)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """What an epoch took. Times of training are by rank, and None while the epoch lasts."""

    exchange: EpochExchange
    training: tuple[TrainingTime, ...] | None

    @property
    def training_seconds(self) -> float | None:
        """Time of the tasks on the worker where it is longest."""
        return None if self.training is None else max((rank.seconds for rank in self.training), default=0.0)

    def in_words(self) -> str:
        """The times, and the delivery."""
        training, made = human_seconds(self.training_seconds), self.exchange
        times = f"training {training}, waiting {human_seconds(made.waited_seconds)}, "
        return f"{times}exchange {human_seconds(made.exchange_seconds)} ({made.delivery})"


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

    ``epoch`` is None before the first epoch of the session. ``slow_rank`` says in words which rank the others wait for;
    it is empty if there is none.
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
    slow_rank: str = ""

    def progress(self) -> str:
        """The epoch and the phase, in words."""
        return f"{'before its first epoch' if self.epoch is None else f'epoch {self.epoch}'}, {self.phase}"

    def details(self) -> str:
        """What the session waits for, what the last epoch took, and which rank is slow, in words."""
        ended = [epoch for epoch in self.epochs if epoch.training_seconds is not None][-1:]
        words = [f"epoch {epoch.exchange.epoch}: {epoch.in_words()}" for epoch in ended] + [self.slow_rank]
        return "; ".join([f", {self.waiting_for}" if self.waiting_for else "", *filter(None, words)])

    def _repr_html_(self) -> str:
        return html_from("session", session=self, units=units)


def snapshot_of(
    spec: SessionSpec, machine: SessionMachine, log: ExchangeLog, addresses: Mapping[int, str]
) -> SessionSnapshot:
    """What the coordinator of a session knows."""

    def state(participant: int) -> str:
        lost = participant in machine.unsettled
        return "lost" if lost else "exchanging" if machine.owes_rows(participant) else "ready"

    # What an epoch's training took is known when the next one begins.
    training = [*(exchange.training_before or () for exchange in list(log.exchanges)[1:]), None]
    epochs = tuple(
        EpochFigures(exchange=replace(exchange, addresses={}), training=ranks)
        for exchange, ranks in zip(log.exchanges, training, strict=False)
    )
    return SessionSnapshot(
        session_id=spec.session_id,
        way=spec.shuffle.choices.label,
        n_samples=spec.shuffle.n_samples,
        row_nbytes=spec.dataset.layout.nbytes,
        epoch=machine.epoch if machine.epoch >= machine.first_epoch else None,
        phase="ready" if machine.is_ready else machine.phase.name.lower(),
        waiting_for=machine.waiting_for(),
        participants=tuple(
            Participant(name=name_of(number), address=address, state=state(number), held=log.n_held.get(number))
            # The ranks by number, then the server.
            for number, address in sorted(addresses.items(), key=lambda item: (item[0] == SERVER, item[0]))
        ),
        epochs=epochs,
        slow_rank=slow_rank_in_words([[rank.own for rank in epoch.training] for epoch in epochs if epoch.training]),
    )


Snapshots = Callable[[], list[SessionSnapshot]]


class OpenSessions(RequestHandler):
    """The page of all open sessions."""

    def initialize(self, snapshots: Snapshots, page: Callable[..., str]) -> None:
        """Keep the function that returns them, and what writes them."""
        self.snapshots, self.page = snapshots, page

    async def get(self) -> None:
        """Answer a request."""
        self.write(await asyncio.to_thread(self.page, sessions=self.snapshots()))


def add_page(scheduler: Scheduler, snapshots: Snapshots) -> None:
    """Add the page to a scheduler's dashboard, if it has one."""
    try:
        served = scheduler.http_application
        prefix = next((page.prefix for page in served.applications if hasattr(page, "prefix")), None)
        if prefix is not None:  # only the dashboard's application has one: no need to import Bokeh to find out
            variables = import_module("distributed.dashboard.scheduler").template_variables(scheduler)
            variables["plots"].append({"url": "dshuffle", "name": "dshuffle"})  # the menu "More..." of all pages
            layout = import_module("distributed.dashboard.components.scheduler").env.get_template("base.html")
            page = {"snapshots": snapshots, "page": partial(html_from, "page", layout=layout, **variables)}
            served.add_handlers(r".*", [(f"{prefix}/dshuffle", OpenSessions, page)])
    except Exception:  # training must not depend on it
        logger.warning("dshuffle: its page could not be added to the dashboard", exc_info=True)
