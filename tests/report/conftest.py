"""A plausible comparison, made up: the six default strategies, five epochs each."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest

from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.planning import Choices
from dshuffle.records import EpochRecord
from dshuffle.report import Comparison, TrainingPoint, WayResult

N_SAMPLES, ROW_NBYTES, N_WORKERS = 100_000, 404, 4

# label, assignment, delivery, sharding, samples needed, exchange seconds, error factor an epoch
WAYS = (
    ("local, as stored", "local", "peer", "contiguous", 0, 0.01, 0.75),
    ("local, shuffled once", "local", "peer", "random", 0, 0.01, 0.02),
    ("partial:0.1 + peer", "partial:0.1", "peer", "contiguous", 7500, 0.05, 0.4),
    ("global + storage", "global", "storage", "random", 75000, 0.9, 0.02),
    ("global + server", "global", "server", "random", 75000, 0.6, 0.02),
    ("global + peer", "global", "peer", "random", 75000, 0.2, 0.02),
)


def make_record(epoch: int, assignment: str, delivery: str, sharding: str, needed: int, seconds: float) -> EpochRecord:
    wire = needed * (ROW_NBYTES + 4) if delivery != "storage" else 0
    store = N_SAMPLES * ROW_NBYTES if delivery == "storage" or epoch == 0 else 0
    return EpochRecord(
        epoch=epoch,
        run_id=epoch,
        choices=Choices(assignment, delivery, sharding=sharding),
        n_workers=N_WORKERS,
        n_samples=N_SAMPLES,
        row_nbytes=ROW_NBYTES,
        needed=N_SAMPLES if epoch == 0 else needed,
        packets=needed,
        components=needed,
        wire_sent_bytes=(wire // N_WORKERS,) * N_WORKERS,
        wire_received_bytes=(wire // N_WORKERS,) * N_WORKERS,
        server_sent_bytes=wire if delivery == "server" else 0,
        metadata_bytes=wire // (ROW_NBYTES + 4) * 4,
        server="dedicated" if delivery == "server" else "",
        store_requests=10 * N_WORKERS if store else 0,
        store_bytes=store,
        store_delivered_bytes=store,
        store_retries=0,
        plan_seconds=0.02,
        gather_seconds=seconds * 0.2 if wire else 0.0,
        transfer_seconds=seconds * 0.7 if wire else 0.0,
        scatter_seconds=seconds * 0.3 if wire else 0.0,
        encode_seconds=0.0,
        decode_seconds=0.0,
        store_seconds=seconds * 0.9 if store else 0.0,
        commit_seconds=0.004,
        exchange_seconds=seconds,
        training_seconds=0.15,
        cpu_idle=0.4 if delivery == "storage" else 0.1,
        waited_seconds=max(0.0, seconds - 0.15),
    )


def make_way(
    label: str, assignment: str, delivery: str, sharding: str, needed: int, seconds: float, factor: float
) -> WayResult:
    jitter = seconds * np.random.default_rng(len(label)).uniform(0.95, 1.1, 5)
    records = [make_record(epoch, assignment, delivery, sharding, needed, jitter[epoch]) for epoch in range(5)]
    return WayResult(
        choices=Choices(assignment=assignment, delivery=delivery, sharding=sharding),
        label=label,
        records=tuple(dataclasses.replace(record, epoch_seconds=0.3 + seconds) for record in records),
        history=tuple(
            TrainingPoint(epoch=epoch, seconds=(epoch + 1) * (0.3 + seconds), error=max(3e-8, 0.6 * factor**epoch))
            for epoch in range(5)
        ),
    )


def changed(comparison, labels, change=None, /, **fields):
    """The comparison with a change of the strategies of these labels, or with other values of their fields."""
    change = change or (lambda way: dataclasses.replace(way, **fields))
    ways = [change(way) if way.label in labels else way for way in comparison.ways]
    return dataclasses.replace(comparison, ways=tuple(ways))


def with_pairs(comparison, labels, values, *, averages="unknown", reference=None, of_runs=MappingProxyType({}), **test):
    test = PairedTest(**{"metric": "rmse", "margin": "1%", "pairs": 5, **test})
    reference = (1.0,) * len(values) if reference is None else reference
    runs = PairedRuns(test=test, reference=reference, way=tuple(values), **of_runs)
    return changed(comparison, labels, lambda way: dataclasses.replace(way, pairs={**way.pairs, averages: runs}))


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return Comparison(
        ways=tuple(make_way(*way) for way in WAYS),
        seed=7,
        settings={"step": 0.02},
        command="dshuffle compare --epochs 5 --seed 7",
        dataset={"url": "/data/keyed.zarr", "samples": N_SAMPLES, "bytes a sample": ROW_NBYTES},
        cluster={"workers": N_WORKERS, "threads a worker": 1, "server": "tcp://127.0.0.1:40001"},
        versions={"dshuffle": "0.1.0", "python": "3.11.9", "distributed": "2026.8.0"},
        machine={"system": "Linux 6.1", "cores": 2, "memory": "16 GB"},
    )
