"""What a session does at this moment, for as long as it is open: in the output of a notebook's cell, or as text."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import weakref
from html import escape
from typing import Any

from dshuffle.errors import DShuffleError
from dshuffle.planning.cost import as_number
from dshuffle.runtime.client.shuffler import Shuffler
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot

SHORTEST = 0.1
"""Least seconds between two looks."""

LINE_EVERY = 5.0
"""Least seconds between two lines of text about the same phase. How far each worker is changes at every look."""

STOP_WITHIN = 5.0
"""Seconds that a widget that is stopped waits for its last look."""


class SessionWidget:
    """A live view of a session, which ends when the session is closed; see :func:`watch`."""

    def __init__(self, shuffler: Shuffler, seconds: float) -> None:
        self._shuffler = weakref.ref(shuffler)  # a shuffler that is dropped closes its session
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        in_notebook = getattr(shell, "kernel", None) is not None  # where output can be replaced
        self._display = importlib.import_module("IPython.display") if in_notebook else None
        self._handle: Any = self._display.display(display_id=True) if self._display else None
        self._phase, self._written = "", 0.0  # of the last line of text
        self._stopped = threading.Event()
        self._update(shuffler)
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
        ends = False
        while not ends:
            ends = self._stopped.wait(seconds)
            if (shuffler := self._shuffler()) is None:
                break
            ends = ends or shuffler.closed or not shuffler._calls.connected
            self._update(shuffler)
            del shuffler
        self._stopped.set()

    def _update(self, shuffler: Shuffler) -> None:
        """Replace the output of the cell, or write a line if the phase is another one, or after a while."""
        session = _asked(shuffler)
        if isinstance(session, str):
            phase, details, html = repr(shuffler), session and f": {session}", shuffler._repr_html_() + escape(session)
        else:
            phase, details = f"{session.way}: {session.progress()}", session.details()
            html = "" if self._display is None else session._repr_html_()
        if self._display is not None:
            self._handle.update(self._display.HTML(html))
        elif phase != self._phase or time.monotonic() >= self._written + LINE_EVERY:
            print(phase, details, sep="", file=sys.stderr, flush=True)
            self._phase, self._written = phase, time.monotonic()


def _asked(shuffler: Shuffler) -> SessionSnapshot | str:
    """What a session does, or why that is not known: empty if it is closed."""
    try:
        return "" if shuffler.closed else shuffler._calls.ask(SessionSnapshot, "snapshot")
    except DShuffleError as error:  # a session that is lost, or follows another one in this moment
        return str(error)


def watch(shuffler: Shuffler, seconds: float = 1.0) -> SessionWidget:
    """Show what a session does, until it is closed: in a notebook as a table, elsewhere as lines on standard error.

    The view has the state of every worker and how many samples it holds, what each pair of workers exchanged and how
    fast, and how long each epoch trained and waited. The page ``/dshuffle`` of the Dask dashboard shows the same.
    Lines have the epoch, whom the session waits for, and the times of the last epoch that has ended. There is a
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
