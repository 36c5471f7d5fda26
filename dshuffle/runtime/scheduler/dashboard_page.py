"""Adds the page ``/dshuffle`` to the Dask dashboard, and serves the same as JSON at ``/dshuffle.json``."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from dshuffle.notebook import html_from
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot

logger = logging.getLogger(__name__)

PATH = "/dshuffle"


class OpenSessions(RequestHandler):
    """All open sessions, in a form."""

    def initialize(self, snapshots: Callable[[], Sequence[SessionSnapshot]], **form: Any) -> None:
        """Keep the function that returns them, and the variables of a page; without these the form is JSON."""
        self.snapshots, self.form = snapshots, form

    async def get(self) -> None:
        """Answer a request."""
        if not self.form:
            self.set_header("Content-Type", "application/json")
        self.write(await asyncio.to_thread(self._written, self.snapshots()))

    def _written(self, sessions: Sequence[SessionSnapshot]) -> str:
        if not self.form:
            return json.dumps([asdict(session) for session in sessions])
        return html_from("page", sessions=[session._repr_html_() for session in sessions], **self.form)


def add_page(scheduler: Scheduler, snapshots: Callable[[], Sequence[SessionSnapshot]]) -> None:
    """Add the page to a scheduler's dashboard if it has one, and the JSON to its HTTP server in any case."""
    try:
        served = scheduler.http_application
        prefix = next((page.prefix for page in served.applications if hasattr(page, "prefix")), None)
        routes: list[Any] = [(f"{prefix or ''}{PATH}.json", OpenSessions, {"snapshots": snapshots})]
        if prefix is not None:  # only the dashboard's application has one: no need to import Bokeh to find out
            form = dict(import_module("distributed.dashboard.scheduler").template_variables(scheduler))
            form["plots"].append({"url": PATH.strip("/"), "name": "dshuffle"})  # the menu "More..." of all pages
            form["layout"] = import_module("distributed.dashboard.components.scheduler").env.get_template("base.html")
            routes.append((prefix + PATH, OpenSessions, {"snapshots": snapshots, **form}))
        served.add_handlers(r".*", routes)
    except Exception:  # training must not depend on it
        logger.warning("dshuffle: its page could not be added to the dashboard", exc_info=True)
