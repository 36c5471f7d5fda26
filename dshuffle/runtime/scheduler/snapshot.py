"""What a session does at a moment: for clients, and as a page of the Dask dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

from distributed import Scheduler
from distributed.metrics import time
from tornado.web import RequestHandler

from dshuffle import units
from dshuffle.errors import ClusterError, WorkerLost
from dshuffle.notebook import html_from
from dshuffle.planning import SERVER, name_of
from dshuffle.planning.remainder import SampleDigest
from dshuffle.records import slow_rank_in_words
from dshuffle.runtime.messages import MemberChanges, TrainedSamples, TrainingTime, UnfinishedTask
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.driver import TICK
from dshuffle.runtime.scheduler.members import member_changes
from dshuffle.runtime.scheduler.participants import LinkFigures, ParticipantUnreachable
from dshuffle.units import human_seconds

logger = logging.getLogger(__name__)


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


async def training_times(session: Coordinator) -> list[TrainingTime]:
    """Time of training since the last commit, by rank. A rank whose worker is lost counts 0."""
    session.check()

    async def of(rank: int) -> TrainingTime:
        if rank in session.machine.unsettled:
            return TrainingTime()
        return await session.participants.ask(TrainingTime, "training", rank)

    return await asyncio.gather(*map(of, session.ranks))


async def trained_samples(session: Coordinator) -> TrainedSamples:
    """The current epoch, how many of its samples each rank has trained on, and the digest of all of these."""
    session.check()
    epoch = session.epoch
    digests = await asyncio.gather(*(_trained_by(session, rank, epoch) for rank in session.ranks))
    counts = tuple(digest.count for digest in digests)
    return TrainedSamples(epoch=epoch, counts=counts, digest=SampleDigest.summed(digest.fields for digest in digests))


async def _trained_by(session: Coordinator, rank: int, epoch: int) -> SampleDigest:
    loop, settings = asyncio.get_running_loop(), session.settings
    began = loop.time()
    while rank not in session.machine.unsettled:
        try:
            return await session.participants.ask(SampleDigest, "trained", rank, epoch=epoch)
        except WorkerLost as error:  # perhaps nobody has noticed that it is lost, or a task blocks it
            seconds = loop.time() - began
            may_be_busy = isinstance(error, ParticipantUnreachable) and seconds < settings.timeout
            if seconds >= settings.heartbeat and not (may_be_busy and await session.process_runs(rank, seconds)):
                raise
        await asyncio.sleep(TICK)
        session.check()
    return SampleDigest()  # the task of a lost worker runs again


def unfinished_tasks(session: Coordinator, epoch: int, calls: list[int]) -> list[UnfinishedTask]:
    """The tasks of some calls in an epoch that did not finish, each with its outcome."""
    return session.outcomes.unfinished(epoch, calls, len(session.ranks))


def silent_tasks(session: Coordinator) -> list[str]:
    """Which members run tasks and have not answered Dask for a heartbeat, in words."""
    reasons = []
    for rank, address in session.addresses.items():
        worker = session.scheduler.workers.get(address)
        silent = 0.0 if worker is None or not worker.processing else time() - worker.last_seen
        if silent >= session.settings.heartbeat:
            name = session.participants.name_of(rank)
            reasons.append(
                f"waiting for tasks on {name}, which has not answered for {silent:.0f} s: it is stopped or cut off, "
                "or a task holds Python's global lock"
            )
    return reasons


def member_addresses(session: Coordinator) -> dict[int, str]:
    """Address of every rank, and of the server."""
    return dict(session.addresses)


def membership(session: Coordinator) -> MemberChanges:
    """How the workers of the cluster differ from the members."""
    session.check()
    return member_changes(session.scheduler, session.choice, session.addresses)


def substitute_reader(session: Coordinator, load: str, address: str, reason: str) -> str:
    """Address of the worker that reads the store in place of one that is late or lost."""
    session.check()
    return session.participants.reader_for(load, address, session.machine.unsettled, reason)


def end_collective(session: Coordinator, address: str, **call: Any) -> None:
    """Fail the ranks that wait for a mean at rank 0. If rank 0 has left this address, nobody waits there."""
    if session.addresses[0] == address:
        session.driver.spawn(_end_collective(session, **call))


async def _end_collective(session: Coordinator, reason: str, **call: Any) -> None:
    try:
        await session.participants.ask(type(None), "end_collective", 0, reason=reason, **call)
    except ClusterError as error:  # its worker or the call has ended
        logger.debug("dshuffle: rank 0 could not be told that %s: %s", reason, error)
