"""HTML for notebooks and the dashboard, from the folder ``templates``, which Dask's widgets look into."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def _template(name: str) -> Any:
    widgets = importlib.import_module("dask.widgets")  # many import this file that need no Dask
    widgets.TEMPLATE_PATHS.append(str(Path(__file__).with_name("templates")))
    return widgets.get_template(f"dshuffle_{name}.html.j2")


def html_from(template: str, **values: Any) -> str:
    """Return what a template makes of values."""
    return str(_template(template).render(values))


def html_summary(title: str, facts: Mapping[str, object]) -> str:
    """Return a heading, and the facts as a list of names and values."""
    return html_from("summary", title=title, facts=facts)
