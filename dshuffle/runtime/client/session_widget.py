"""What a session does at this moment, for as long as it is open: in the output of a notebook's cell, or as text."""

from __future__ import annotations

import importlib
import sys
import threading
import time
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

LINE_EVERY = 5.0
"""Least seconds between two lines of text about the same phase. How far each worker is changes at every look."""

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
        self._view = NotebookView(shuffler) if in_notebook() else TextView(shuffler)
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
                self._view.update(shuffler)
                del shuffler
        finally:
            self._stopped.set()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, so that output can be replaced."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """A table in the output of a cell, which is replaced."""

    def __init__(self, shuffler: Shuffler) -> None:
        self._display = importlib.import_module("IPython.display")
        self._handle = self._display.display(self._display.HTML(_html(shuffler)), display_id=True)

    def update(self, shuffler: Shuffler) -> None:
        """Show what the session does now."""
        self._handle.update(self._display.HTML(_html(shuffler)))


class TextView:
    """Lines on standard error. A line is written if it differs from the last one: at once if the phase is another."""

    def __init__(self, shuffler: Shuffler) -> None:
        self._last = self._phase = ""
        self._written = 0.0
        self.update(shuffler)

    def update(self, shuffler: Shuffler) -> None:
        """Write what the session does now."""
        phase, details = _text(shuffler)
        text, now = phase + details, time.monotonic()
        if text == self._last or (phase == self._phase and now < self._written + LINE_EVERY):
            return
        print(text, file=sys.stderr, flush=True)
        self._last, self._phase, self._written = text, phase, now


def _text(shuffler: Shuffler) -> tuple[str, str]:
    """The phase of a session, and details of it that may change at every look."""
    if shuffler.closed:
        return repr(shuffler), ""
    try:
        snapshot = shuffler._calls.ask(SessionSnapshot, "snapshot")
    except DShuffleError as error:
        return f"{shuffler!r}: {error}", ""
    details = f", {snapshot.waiting_for}" if snapshot.waiting_for else ""
    ended = [epoch for epoch in snapshot.epochs if epoch.training_seconds is not None]
    if ended:
        details += f"; epoch {ended[-1].epoch}: {_times(ended[-1])}"
    if snapshot.slow_rank:
        details += f"; {snapshot.slow_rank}"
    return f"{snapshot.way}: {snapshot.progress()}", details


def _times(epoch: EpochFigures) -> str:
    times = f"training {human_seconds(epoch.training_seconds)}, waiting {human_seconds(epoch.waited_seconds)}, "
    return f"{times}exchange {human_seconds(epoch.exchange_seconds)} ({epoch.delivery})"


def _html(shuffler: Shuffler) -> str:
    if shuffler.closed:
        return shuffler._repr_html_()
    try:
        snapshot = shuffler._calls.ask(SessionSnapshot, "snapshot")
    except DShuffleError as error:  # a session that is lost, or follows another one in this moment
        return f"{shuffler._repr_html_()}<p>{escape(str(error))}</p>"
    return session_html(snapshot)


def watch(shuffler: Shuffler, seconds: float = 1.0) -> SessionWidget:
    """Show what a session does, until it is closed: in a notebook as a table, elsewhere as lines on standard error.

    The view has the state of every worker and how many samples it holds, what each pair of workers exchanged and how
    fast, and how long each epoch trained and waited. The page ``/dshuffle`` of the Dask dashboard shows the same as
    plots. Lines have the epoch, whom the session waits for, and the times of the last epoch that has ended. There is a
    line for each phase, and at most one more every five seconds. The call returns at once.

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
    """
    return SessionWidget(shuffler, as_number("seconds", seconds, SHORTEST))


def session_html(session: SessionSnapshot) -> str:
    """The view of a session at a moment."""
    facts = {
        "samples": f"{human_count(session.n_samples)} ({human_bytes(session.n_samples * session.row_nbytes)})",
        "now": session.progress(),
    }
    if session.waiting_for:
        facts["waiting"] = session.waiting_for
    if session.slow_rank:
        facts["slow rank"] = session.slow_rank
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
        rows.append(f"<tr><td>{epoch.epoch}</td><td>{bars}</td><td>{escape(_times(epoch))}</td></tr>")
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
