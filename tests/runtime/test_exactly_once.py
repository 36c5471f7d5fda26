"""Every sample is trained on exactly once an epoch, with the store's own bytes, whichever way it is shuffled."""

from __future__ import annotations

import zlib

import dask
import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.exchange import comms as buffers
from dshuffle.exchange.comms import LEAST_NBYTES
from dshuffle.planning import CACHINGS, DELIVERIES, RELAYS, SHARDINGS
from dshuffle.planning.assignment import ASSIGNMENTS

from ..conftest import written

# Fractions Q are random here, also those that mix badly.
pytestmark = pytest.mark.filterwarnings("ignore::dshuffle.errors.MixingWarning")

DTYPES = ("?", "i1", "<u2", "<i4", "<f2", "<f4", "<f8", "<c16", "S5", "<U3")
SHAPES = ((), (1,), (3,), (17,), (2, 5), (3, 1, 2))


def random_dataset(rng, folder, n_workers, assignment):
    """Arrays of random bytes, so that any mix-up of rows shows; booleans are the only dtype that restricts them."""
    n_samples = int(rng.choice([n_workers, n_workers + 1, rng.integers(n_workers, 60), rng.integers(60, 3000)]))
    arrays = {}
    for name in "abc"[: rng.integers(1, 4)]:
        dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
        shape = (n_samples, *SHAPES[rng.integers(len(SHAPES))])
        words = rng.integers(0, 2 if dtype.kind == "?" else 128, (*shape, dtype.itemsize), np.uint8)
        if dtype.kind == "U":
            words.reshape(*shape, -1, 4)[..., 1:] = 0
        arrays[name] = words.view(dtype)[..., 0]
    most = (
        (n_samples - 1) // (n_workers - 1) if ASSIGNMENTS[assignment].in_chunks else n_samples
    )  # a chunk for every worker
    chunk_rows = int(rng.integers(min(most, max(1, n_samples // 20)), most + 1))
    return arrays, create_dataset(str(folder), arrays, chunk_rows=chunk_rows)


def random_job(rng, assignment, delivery, n_workers, nbytes, n_epochs):
    """A way to shuffle, and the sizes of messages: of a small dataset down to one sample a message."""
    fraction = rng.choice([0.0, 1.0, rng.uniform(1 / n_workers, 1)])
    if not DELIVERIES[delivery].supports(n_workers, excess=True):
        fraction = 0.0
    elif DELIVERIES[delivery].coded:  # often one that packets gain from
        fraction = rng.choice([fraction, rng.uniform(1 / n_workers, 0.7)])
    job = {
        "assignment": written(assignment, fraction=rng.choice([0, 1, rng.random()]), rows=None),
        "delivery": delivery,
        "caching": str(rng.choice(sorted(CACHINGS))),
        "sharding": str(rng.choice(sorted(SHARDINGS))),
        "cache_fraction": float(fraction) or None,
        "relay": str(rng.choice(sorted(RELAYS))),
        "seed": int(rng.integers(-(2**40), 2**40)),
    }
    # Some thousand messages in all show what a hundred thousand would.
    message_bytes = max(nbytes * n_epochs // 1500, int(rng.choice([1, 300, 5_000, 8 << 20])))
    window_bytes = message_bytes * int(rng.integers(1, 10))
    return job, {"dshuffle.message-bytes": message_bytes, "dshuffle.window-bytes": window_bytes}


def check_run(client, n_workers, rng, assignment, delivery, folder, n_epochs, **chosen):
    arrays, dataset = random_dataset(rng, folder, n_workers, assignment)
    job, config = random_job(rng, assignment, delivery, n_workers, dataset.n_samples * dataset.row_nbytes, n_epochs)
    job |= chosen
    chunks = {info.chunk_rows for info in dataset.arrays.values()}

    def contents(partition):
        columns = {name: partition[name] for name in partition.names}
        batches = [partition.sample_ids[:0].copy(), *(batch["a"] for batch in partition.batches(7))]
        return partition.rank, partition.epoch, partition.sample_ids.copy(), columns, batches

    with dask.config.set(config), Shuffler(client, dataset, **job) as shuffler:
        context = f"{job} {config} {dataset}"
        assert shuffler.n_workers == n_workers, context
        for expected, epoch in enumerate(shuffler.epochs(n_epochs)):
            parts = client.gather(epoch.map(contents))
            assert [(rank, number) for rank, number, *_ in parts] == [(k, expected) for k in range(n_workers)], context
            sizes = [len(ids) for _, _, ids, *_ in parts]
            assert max(sizes) - min(sizes) <= (min(chunks) if ASSIGNMENTS[assignment].in_chunks else 1), context
            trained_on = np.concatenate([ids for _, _, ids, *_ in parts])
            assert np.array_equal(np.sort(trained_on), np.arange(dataset.n_samples)), context
            for _, _, ids, columns, batches in parts:
                assert columns.keys() == arrays.keys(), context
                for name, column in columns.items():
                    assert column.tobytes() == arrays[name][ids].tobytes(), f"{name}: {context}"
                assert np.concatenate(batches[1:]).tobytes() == arrays["a"][ids].tobytes(), context
        assert [record.epoch for record in shuffler.records] == list(range(n_epochs)), context


def share_from(nbytes):
    """Share the memory of messages that are longer than this."""
    buffers.LEAST_NBYTES = nbytes


CODED = {name for name, delivery in DELIVERIES.items() if delivery.coded}
UNCODED = DELIVERIES.keys() - CODED
PAIRS = [(assignment, delivery) for assignment in ASSIGNMENTS for delivery in sorted(UNCODED)]
CODED_PAIRS = [(assignment, delivery) for assignment in ASSIGNMENTS for delivery in sorted(CODED)]


@pytest.mark.slow
@pytest.mark.parametrize(("assignment", "delivery"), PAIRS + CODED_PAIRS)
def test_on_processes(processes, tmp_path, assignment, delivery):
    rng = np.random.default_rng(zlib.crc32(f"processes {assignment} {delivery}".encode()))
    check_run(processes, 3, rng, assignment, delivery, tmp_path / "0.zarr", 4)
    processes.run(share_from, 0)  # the messages here are too short otherwise
    try:
        check_run(processes, 3, rng, assignment, delivery, tmp_path / "1.zarr", 4)
    finally:
        processes.run(share_from, LEAST_NBYTES)


@pytest.mark.slow
@pytest.mark.parametrize(("assignment", "delivery"), PAIRS)
def test_on_threads(threads, tmp_path, assignment, delivery):
    rng = np.random.default_rng(zlib.crc32(f"threads {assignment} {delivery}".encode()))
    for job in range(4):
        check_run(threads, 5, rng, assignment, delivery, tmp_path / f"{job}.zarr", 6)


@pytest.mark.slow
@pytest.mark.parametrize(("assignment", "delivery"), CODED_PAIRS)
def test_coded_on_threads(threads, tmp_path, assignment, delivery):
    key = zlib.crc32(f"{assignment} {delivery}".encode())
    rng = np.random.default_rng(key)
    for number, caching in enumerate(sorted(CACHINGS)):
        n_epochs = 15 if number == key % len(CACHINGS) else 5  # one long run for each pair, and of each caching some
        check_run(threads, 5, rng, assignment, delivery, tmp_path / f"{caching}.zarr", n_epochs, caching=caching)


@pytest.mark.parametrize(
    ("assignment", "delivery"), [("global", "clique"), ("global", "peer"), ("global", "server"), ("chunks", "storage")]
)
def test_in_brief(threads, tmp_path, assignment, delivery):
    rng = np.random.default_rng(1)
    check_run(threads, 5, rng, assignment, delivery, tmp_path / "d.zarr", 3)
