"""Adds the page ``/dshuffle`` to the Dask dashboard, and serves the same as JSON at ``/dshuffle.json``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module

from distributed import Scheduler
from tornado.web import RequestHandler

from dshuffle.notebook import html_from
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot

logger = logging.getLogger(__name__)

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
