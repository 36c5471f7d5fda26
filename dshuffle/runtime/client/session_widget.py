"""What a session does at this moment, in the output of a notebook's cell, for as long as it is open."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Sequence
from html import escape
from typing import Any

from dshuffle.errors import DShuffleError
from dshuffle.notebook import html_summary, html_table
from dshuffle.planning.cost.cluster import as_number
from dshuffle.runtime.client.shuffler import Shuffler
from dshuffle.runtime.scheduler.snapshot import EpochFigures, LinkFigures, SessionSnapshot
from dshuffle.units import human_bytes, human_count, human_rate, human_seconds

SHOWN_EPOCHS = 10
"""Epochs of which times are shown."""

SHORTEST = 0.1
"""Least seconds between two looks."""

STOP_WITHIN = 5.0
"""Seconds that a widget that is stopped waits for its last look."""

TRAINING, WAITING = "#5B6470", "#D55E00"
"""Colours of the page of the dashboard."""


class SessionWidget:
    """A live view of a session, which ends when the session is closed; see :func:`watch`.

    Parameters
    ----------
    shuffler
        The shuffler to look at.
    seconds
        Time between two looks.
    """

    def __init__(self, shuffler: Shuffler, seconds: float) -> None:
        self._shuffler = weakref.ref(shuffler)  # a shuffler that is dropped closes its session
        self._display = importlib.import_module("IPython.display")
        self._handle = self._display.display(self._display.HTML(_html(shuffler)), display_id=True)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(seconds,), name="dshuffle-watch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else "watches"
        return f"<SessionWidget {state} {self._shuffler() or 'a shuffler that is gone'}>"

    def stop(self) -> None:
        """Stop looking. What was shown last stays."""
        self._stopped.set()
        self._thread.join(STOP_WITHIN)  # it may wait for a scheduler that does not answer

    def _look(self, seconds: float) -> None:
        try:
            ends = False
            while not ends:
                ends = self._stopped.wait(seconds)
                shuffler = self._shuffler()
                if shuffler is None:
                    return
                ends = ends or shuffler.closed or not shuffler._calls.connected
                self._handle.update(self._display.HTML(_html(shuffler)))
                del shuffler
        finally:
            self._stopped.set()


def _html(shuffler: Shuffler) -> str:
    if shuffler.closed:
        return shuffler._repr_html_()
    try:
        snapshot = shuffler._calls.ask(SessionSnapshot, "snapshot")
    except DShuffleError as error:  # a session that is lost, or follows another one in this moment
        return f"{shuffler._repr_html_()}<p>{escape(str(error))}</p>"
    return session_html(snapshot)


def watch(shuffler: Shuffler, seconds: float = 1.0) -> SessionWidget:
    """Show in a notebook what a session does, until it is closed.

    The view has the state of every worker and how many samples it holds, what each pair of workers exchanged and how
    fast, and how long each epoch trained and waited. The page ``/dshuffle`` of the Dask dashboard shows the same as
    plots. The cell returns at once.

    Parameters
    ----------
    shuffler
        The shuffler to look at.
    seconds
        Time between two looks, at least 0.1. Each one is a short message to the scheduler.

    Returns
    -------
    SessionWidget
        A handle whose ``stop`` ends it.

    Raises
    ------
    InvalidParameter
        If ``seconds`` is not a number of at least 0.1.
    ImportError
        If IPython is not installed.
    """
    return SessionWidget(shuffler, as_number("seconds", seconds, SHORTEST))


def session_html(session: SessionSnapshot) -> str:
    """The view of a session at a moment."""
    facts = {
        "samples": f"{human_count(session.n_samples)} ({human_bytes(session.n_samples * session.row_nbytes)})",
        "epoch": f"{session.epoch}, {session.phase}",
    }
    if session.waiting_for:
        facts["waiting"] = session.waiting_for
    headings = ("participant", "address", "state", "samples held")
    rows = [
        (member.name, member.address, member.state, "" if member.held is None else f"{member.held:,}")
        for member in session.participants
    ]
    return html_summary(session.way, facts, headings, rows) + _epochs(session.epochs) + _links(session.links)


def _epochs(epochs: Sequence[EpochFigures]) -> str:
    shown = epochs[-SHOWN_EPOCHS:]
    longest = max(((epoch.training_seconds or 0.0) + epoch.waited_seconds for epoch in shown), default=0.0)
    rows = []
    for epoch in shown:
        parts = ((TRAINING, epoch.training_seconds or 0.0), (WAITING, epoch.waited_seconds))
        bars = "".join(_bar(colour, part / longest) for colour, part in parts if longest)
        times = f"training {human_seconds(epoch.training_seconds)}, waiting {human_seconds(epoch.waited_seconds)}, "
        text = escape(f"{times}exchange {human_seconds(epoch.exchange_seconds)} ({epoch.delivery})")
        rows.append(f"<tr><td>{epoch.epoch}</td><td>{bars}</td><td>{text}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _bar(colour: str, part: float) -> str:
    return f'<span style="display:inline-block;height:.8em;background:{colour};width:{12 * part:.2f}em"></span>'


def _links(links: Sequence[LinkFigures]) -> str:
    senders = list(dict.fromkeys(link.sender for link in sorted(links, key=lambda link: _order(link.sender))))
    cells: dict[str, dict[str, Any]] = {}
    for link in links:
        cells.setdefault(link.receiver, {})[link.sender] = f"{human_bytes(link.nbytes)} ({human_rate(link.rate)})"
    rows = [(receiver, *(row.get(sender, "") for sender in senders)) for receiver, row in cells.items()]
    return html_table(("received by, from", *senders), rows) if rows else ""


def _order(name: str) -> tuple[int, str]:
    """Ranks by number, then the server."""
    return len(name), name
