"""A cluster for tests that only see that a session takes what they have opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client


@pytest.fixture(scope="package")
def client() -> Iterator[Client]:
    """Two workers in this process."""
    with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        yield client
