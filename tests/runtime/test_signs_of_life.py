"""Workers on slow links: their answers are late, and they are not lost while they give signs of life."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import WorkerLost
from dshuffle.runtime.worker import session
from dshuffle.runtime.worker.signs_of_life import SignsOfLife

pytestmark = pytest.mark.slow  # seconds of waiting

HEARTBEAT = 1.5


@pytest.fixture
def slow(cluster_of, tmp_path):
    """Workers whose links have 1 Mbit/s, and which never get the scheduler's questions, with a dataset."""
    settings = {"dshuffle.emulated-links": "1mbit", "dshuffle.heartbeat": f"{HEARTBEAT} s"}
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.random.default_rng(0).random((400, 512))}, chunk_rows=50)

    def ask_in_vain(dask_worker: Any) -> None:
        async def never(**_: Any) -> None:
            await asyncio.sleep(3600)

        dask_worker.handlers["dshuffle_status"] = never

    with dask.config.set(settings), cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, dataset):
            client.run(ask_in_vain)
        yield client, dataset


def train(client: Client, dataset: Any) -> Any:
    with Shuffler(client, dataset, on_loss="raise") as shuffler:
        for epoch in shuffler.epochs(2):
            assert sum(client.gather(epoch.map(len))) == 400
    return shuffler.records[1]


def test_workers_that_give_signs_of_life_are_not_lost(slow) -> None:
    assert train(*slow).exchange_seconds > 2 * HEARTBEAT


def test_without_signs_of_life_they_are_lost(slow, monkeypatch) -> None:
    monkeypatch.setattr(SignsOfLife, "_give", lambda self: None)
    with pytest.raises(WorkerLost, match="has not answered for 1.5 s"):
        train(*slow)


def test_a_worker_from_which_bytes_arrive_at_another_one_is_not_lost(slow, monkeypatch) -> None:
    """Nothing that worker 1 says reaches the scheduler, until it votes."""
    client, dataset = slow
    give, heard = SignsOfLife._give, session.WorkerSession.heard

    def only_of_others(self: SignsOfLife) -> None:
        if self._participant != 1:
            give(self)

    def with_bytes_of_1(self: session.WorkerSession) -> dict[int, float] | None:
        ages = heard(self)
        return None if ages is None else {**ages, 1: 0.1}

    monkeypatch.setattr(SignsOfLife, "_give", only_of_others)
    with pytest.raises(WorkerLost, match="rank 1 .* has not answered for 1.5 s"):
        train(client, dataset)
    monkeypatch.setattr(session.WorkerSession, "heard", with_bytes_of_1)
    train(client, dataset)
