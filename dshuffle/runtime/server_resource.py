"""The Dask resource of workers that serve and do not train."""

from __future__ import annotations

from collections.abc import Mapping

SERVER_RESOURCE = "dshuffle-server"
"""Dask resource of a worker that serves and does not train."""


def only_serves(resources: Mapping[str, float] | None) -> bool:
    """Whether a worker with these Dask resources serves and does not train."""
    return SERVER_RESOURCE in (resources or {})
