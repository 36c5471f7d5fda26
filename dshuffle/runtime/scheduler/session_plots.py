"""Plots and a table of each open session, for the page of the dashboard. They are updated while somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import BasicTicker, ColumnDataSource, DataRange1d, FactorRange, HoverTool, LinearColorMapper
from bokeh.models.annotations import ColorBar
from bokeh.models.widgets.markups import Div
from bokeh.palettes import Blues256
from bokeh.plotting import figure
from bokeh.transform import dodge
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from dshuffle.runtime.scheduler.snapshot import EpochFigures, LinkFigures, SessionSnapshot
from dshuffle.units import human_bytes, human_count, human_rate, human_seconds

INTERVAL_MS = 500
SHOWN_EPOCHS = 60
TRAINING, WAITING, EXCHANGE = "#5B6470", "#D55E00", "#0072B2"
SENT, RECEIVED = "#BCC2C9", "#0072B2"


def fill(document: Document, snapshots: Callable[[], Sequence[SessionSnapshot]], extra: dict[str, Any]) -> None:
    """Fill a Bokeh document with a section for each session, and keep it up to date."""
    nothing = Div(text="<p>No session is open. <code>dshuffle.Shuffler</code> opens one.</p>", name="nothing")
    page = column(nothing, sizing_mode="stretch_width", name="sessions")
    sections: dict[str, Section] = {}

    def update() -> None:
        sessions = {session.session_id: session for session in snapshots()}
        if sessions.keys() != sections.keys():
            for session_id in sections.keys() - sessions.keys():
                del sections[session_id]
            for session_id in sessions.keys() - sections.keys():
                sections[session_id] = Section()
            page.children = [sections[session_id].layout for session_id in sessions] or [nothing]
        for session_id, session in sessions.items():
            sections[session_id].show(session)

    update()
    document.title = "Dask: dshuffle"
    document.add_root(page)
    document.add_periodic_callback(update, INTERVAL_MS)
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME


class Section:
    """The part of the page about one session."""

    def __init__(self) -> None:
        self._head = Div(sizing_mode="stretch_width")
        self._workers = Div(sizing_mode="stretch_width")
        self._epochs = ColumnDataSource(_epoch_columns(()))
        self._bytes = ColumnDataSource(_byte_columns(()))
        look: dict[str, Any] = {"height": 260, "sizing_mode": "stretch_width", "toolbar_location": None, "tools": ""}
        times = figure(title="Seconds of each epoch", y_range=DataRange1d(start=0), **look)
        bars: list[Any] = times.vbar_stack(
            ["training", "waiting"],
            x="epoch",
            width=0.8,
            color=[TRAINING, WAITING],
            source=self._epochs,
            legend_label=["training", "waiting for the exchange"],
        )
        times.scatter("epoch", "exchange", size=7, color=EXCHANGE, source=self._epochs, legend_label="exchange")
        times.add_tools(HoverTool(renderers=bars, tooltips="epoch @epoch, @delivery: @words"))
        times.xaxis.axis_label = "epoch"
        moved = figure(title="MB of each worker in the last exchange", y_range=DataRange1d(start=0), **look)
        for name, colour, shift in (("received", RECEIVED, -0.2), ("sent", SENT, 0.2)):
            moved.vbar(
                x=dodge("rank", shift), top=name, width=0.38, color=colour, source=self._bytes, legend_label=name
            )
        moved.xaxis.axis_label = "rank"
        self._links = ColumnDataSource(_link_columns(()))
        self._names = FactorRange(), FactorRange()  # senders, and receivers from above to below
        pairs = [
            _matrix("MB by pair of participants in the last exchange", "mb", self._links, self._names),
            _matrix("MB/s of each link, from first request to last answer", "rate", self._links, self._names),
        ]
        self._pairs = row(*pairs, sizing_mode="stretch_width", visible=False)
        for plot in (times, moved):
            plot.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)  # epochs and ranks are whole numbers
            legend = plot.legend[0]
            plot.add_layout(legend, "above")
            legend.update(orientation="horizontal", location="top_left", margin=0, padding=4, border_line_alpha=0)
        self.layout = column(
            self._head,
            row(times, moved, sizing_mode="stretch_width"),
            self._workers,
            self._pairs,
            sizing_mode="stretch_width",
        )

    def show(self, session: SessionSnapshot) -> None:
        """Show the state of the session."""
        shown = session.epochs[-SHOWN_EPOCHS:]
        self._head.text = _heading(session)
        self._workers.text = _table(session)
        columns = _epoch_columns(shown)
        if columns != self._epochs.data:
            self._epochs.data = columns
            self._bytes.data = _byte_columns(shown)
            names = [_short(participant.name) for participant in session.participants]
            self._names[0].factors, self._names[1].factors = names, names[::-1]
            self._links.data = _link_columns(session.links)
            self._pairs.visible = bool(session.links)


def _matrix(title: str, value: str, source: ColumnDataSource, names: tuple[FactorRange, FactorRange]) -> Any:
    """A square for each link, whose colour is a value of it."""
    look: dict[str, Any] = {"height": 300, "sizing_mode": "stretch_width", "toolbar_location": None, "tools": ""}
    plot = figure(title=title, x_range=names[0], y_range=names[1], **look)
    colours = LinearColorMapper(palette=Blues256[::-1], low=0)
    squares = plot.rect(
        "sender", "receiver", width=0.94, height=0.94, source=source, fill_color={"field": value, "transform": colours}
    )
    squares.glyph.line_color = None
    plot.add_layout(ColorBar(color_mapper=colours, width=10, padding=4), "right")
    plot.add_tools(HoverTool(renderers=[squares], tooltips="@words"))
    plot.xaxis.axis_label, plot.yaxis.axis_label = "sender", "receiver"
    return plot


def _short(name: str) -> str:
    return name.removeprefix("rank ").removeprefix("the ")


def _heading(session: SessionSnapshot) -> str:
    n_bytes = human_bytes(session.n_samples * session.row_nbytes)
    waiting = f"<p><b>{escape(session.waiting_for)}</b></p>" if session.waiting_for else ""
    slow = f"<p>{escape(session.slow_rank)}.</p>" if session.slow_rank else ""
    return (
        f"<h2 style='margin: 1em 0 0'>{escape(session.way)}</h2>"
        f"<p>{human_count(session.n_samples)} samples ({n_bytes}) on "
        f"{len(session.participants)} participants; <b>{escape(session.progress())}</b>. "
        f"Session {escape(session.session_id)}.</p>{slow}{waiting}"
    )


def _table(session: SessionSnapshot) -> str:
    last = session.epochs[-1] if session.epochs else None
    names = ("participant", "address", "state", "samples held", "trained", "received", "sent", "rate in")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    trained = next(
        (epoch.rank_training_seconds for epoch in reversed(session.epochs) if epoch.rank_training_seconds), ()
    )
    for rank, participant in enumerate(session.participants):
        received = sent = rate = None
        if last is not None and rank < len(last.received_bytes):
            received, sent = last.received_bytes[rank], last.sent_bytes[rank]
            rate = received / last.exchange_seconds if last.exchange_seconds else None
        elif last is not None:
            sent = last.server_sent_bytes
        held = "" if participant.held is None else f"{participant.held:,}"
        cells = (
            participant.name,
            participant.address,
            participant.state,
            held,
            human_seconds(trained[rank]) if rank < len(trained) else "",
            human_bytes(received),
            human_bytes(sent),
            human_rate(rate),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    style = "<style>td, th { padding: 2px 14px 2px 0; text-align: left; }</style>"
    return f"{style}<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _epoch_columns(epochs: Sequence[EpochFigures]) -> dict[str, list[Any]]:
    def words(epoch: EpochFigures) -> str:
        training, waiting = human_seconds(epoch.training_seconds), human_seconds(epoch.waited_seconds)
        return f"training {training}, waiting {waiting}, exchange {human_seconds(epoch.exchange_seconds)}"

    return {
        "epoch": [epoch.epoch for epoch in epochs],
        "training": [epoch.training_seconds or 0.0 for epoch in epochs],
        "waiting": [epoch.waited_seconds for epoch in epochs],
        "exchange": [epoch.exchange_seconds for epoch in epochs],
        "delivery": [epoch.delivery for epoch in epochs],
        "words": [words(epoch) for epoch in epochs],
    }


def _link_columns(links: Sequence[LinkFigures]) -> dict[str, list[Any]]:
    return {
        "sender": [_short(link.sender) for link in links],
        "receiver": [_short(link.receiver) for link in links],
        "mb": [link.nbytes / 1e6 for link in links],
        "rate": [link.rate / 1e6 for link in links],
        "words": [
            f"{link.receiver} from {link.sender}: {human_bytes(link.nbytes)} in {human_seconds(link.seconds)}, "
            f"{human_rate(link.rate)}"
            for link in links
        ],
    }


def _byte_columns(epochs: Sequence[EpochFigures]) -> dict[str, list[Any]]:
    if not epochs:
        return {"rank": [], "received": [], "sent": []}
    last = epochs[-1]
    return {
        "rank": list(range(len(last.received_bytes))),
        "received": [nbytes / 1e6 for nbytes in last.received_bytes],
        "sent": [nbytes / 1e6 for nbytes in last.sent_bytes],
    }
