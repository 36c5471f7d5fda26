"""Adds the page ``/dshuffle`` to the Dask dashboard, and serves the same as JSON at ``/dshuffle.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from distributed import Scheduler
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from dshuffle.runtime.scheduler.snapshot import SessionSnapshot

logger = logging.getLogger(__name__)

PATH = "/dshuffle"

Snapshots = Callable[[], Sequence[SessionSnapshot]]


class SessionsAsJson(RequestHandler):
    """All open sessions as JSON."""

    def initialize(self, snapshots: Snapshots) -> None:
        """Keep the function that returns them."""
        self.snapshots = snapshots

    def get(self) -> None:
        """Answer a request."""
        self.set_header("Content-Type", "application/json")
        self.write(json.dumps([asdict(session) for session in self.snapshots()]))


def add_page(scheduler: Scheduler, snapshots: Snapshots) -> None:
    """Add the page to a scheduler's dashboard if it has one, and the JSON to its HTTP server in any case."""
    try:
        served = scheduler.http_application
        prefix = next((page.prefix for page in served.applications if hasattr(page, "prefix")), None)
        if prefix is not None:  # only the dashboard's application has one: no need to import Bokeh to find out
            page = _page(scheduler, snapshots, prefix)
            served.add_application(page)
            page.initialize(IOLoop.current())
            page.start()
        served.add_handlers(r".*", [(f"{prefix or ''}{PATH}.json", SessionsAsJson, {"snapshots": snapshots})])
    except Exception:  # training must not depend on it
        logger.warning("dshuffle: its page could not be added to the dashboard", exc_info=True)


def _page(scheduler: Scheduler, snapshots: Snapshots, prefix: str) -> Any:
    dashboard = import_module("distributed.dashboard.scheduler")  # it imports Bokeh, and so does what fills the page
    fill = import_module("dshuffle.runtime.scheduler.session_plots").fill
    variables = dashboard.template_variables(scheduler)
    variables["plots"].append({"url": PATH.strip("/"), "name": "dshuffle"})  # the menu "More..." of all pages
    return dashboard.BokehApplication(
        {PATH: lambda scheduler, extra, document: fill(document, snapshots, extra)},
        scheduler,
        prefix=prefix,
        template_variables=variables,
    )
