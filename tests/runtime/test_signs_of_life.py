"""Workers on slow links: their answers are late, and they are not lost while they give signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import WorkerLost
from dshuffle.runtime.worker.worker_plugin import WorkerSessions

pytestmark = pytest.mark.slow  # seconds of waiting

HEARTBEAT = 1.5


@pytest.fixture
def dataset(tmp_path) -> Any:
    rows = np.random.default_rng(0).random((400, 512))
    return create_dataset(str(tmp_path / "d.zarr"), {"x": rows}, chunk_rows=50)


def train(client: Client, dataset: Any) -> Any:
    with Shuffler(client, dataset, on_loss="raise") as shuffler:
        for epoch in shuffler.epochs(2):
            assert sum(client.gather(epoch.map(len))) == 400
    return shuffler.records[1]


@pytest.fixture
def deaf(cluster_of, dataset) -> Iterator[Client]:
    """Workers whose links have 1 Mbit/s, and which never get the scheduler's questions."""

    def ask_in_vain(dask_worker: Any) -> None:
        async def never(**_: Any) -> None:
            await asyncio.sleep(3600)

        dask_worker.handlers["dshuffle_status"] = never

    settings = {"dshuffle.emulated-links": "1mbit", "dshuffle.heartbeat": f"{HEARTBEAT} s"}
    with dask.config.set(settings), cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, dataset):
            client.run(ask_in_vain)
        yield client


def test_workers_that_give_signs_of_life_are_not_lost(deaf, dataset) -> None:
    assert train(deaf, dataset).exchange_seconds > 2 * HEARTBEAT


def test_without_signs_of_life_they_are_lost(deaf, dataset, monkeypatch) -> None:
    async def give_none(*_: Any) -> None:
        """Say nothing."""

    monkeypatch.setattr(WorkerSessions, "_give_signs", give_none)
    with pytest.raises(WorkerLost, match=r"has not answered for 1\.[5-9]\d* s"):
        train(deaf, dataset)
