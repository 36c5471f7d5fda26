"""Stop training at random, on random numbers of workers, and go on: what is trained on how often?

python tests/benchmarks/random_stops.py --stops 50

Every stop is in the middle of an epoch, and its checkpoint is some batches old. The next session has between two and
seven workers. Samples that were trained on after the checkpoint are trained on again, and counted.
"""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator

import click
import numpy as np
from distributed import Client, LocalCluster

import dshuffle

SAMPLES = 2_000
WAYS = ("global", "partial:0.3", "local", "chunks")


def some(partition: dshuffle.Partition, batches: int, marked: int) -> np.ndarray:
    """Train on some batches, of which the last ones are not marked; return the ids."""
    taken = partition.sample_ids[: 50 * batches]
    partition.mark_trained(min(len(partition), 50 * min(marked, batches)))
    return taken.copy()


def rest(partition: dshuffle.Partition) -> np.ndarray:
    """Train on everything."""
    return partition.sample_ids.copy()


@contextlib.contextmanager
def clients() -> Iterator[dict[int, Client]]:
    """Clients of clusters of two to seven workers."""
    with contextlib.ExitStack() as stack:
        found = {}
        for n_workers in range(2, 8):
            cluster = LocalCluster(n_workers=n_workers, processes=False, dashboard_address=":0")
            found[n_workers] = stack.enter_context(Client(stack.enter_context(cluster)))
        yield found


@click.command()
@click.option("--stops", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(stops: int, seed: int) -> None:
    """Count how often each sample is trained on in each epoch."""
    draw = random.Random(seed)
    started, again, done = time.perf_counter(), 0, 0
    with tempfile.TemporaryDirectory() as folder, clients() as of:
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": np.arange(SAMPLES)}, chunk_rows=20)
        while done < stops:
            way, path = WAYS[done % len(WAYS)], f"{folder}/{done}.json"
            trained: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
            repeated = 0
            session = dshuffle.Shuffler(of[draw.randint(2, 7)], dataset, assignment=way, seed=done, checkpoint=path)
            for _ in range(5):  # stops of one training
                with session as shuffler:
                    for _ in range(draw.randint(0, 1)):  # a whole epoch before the stop
                        [epoch] = shuffler.epochs(1)
                        for ids in shuffler.client.gather(epoch.map(rest)):
                            trained[epoch.number].update(ids.tolist())
                    epoch = next(shuffler.epochs(1))
                    batches, marked = draw.randint(0, 6), draw.randint(0, 6)
                    for ids in shuffler.client.gather(epoch.map(some, batches, marked)):
                        trained[epoch.number].update(ids.tolist())
                        repeated += max(0, len(ids) - 50 * marked)
                    shuffler.save(path)
                session = dshuffle.Shuffler.resume(of[draw.randint(2, 7)], dataset, path)
                done += 1
            with session as shuffler:
                for epoch in shuffler.epochs(2):
                    for ids in shuffler.client.gather(epoch.map(rest)):
                        trained[epoch.number].update(ids.tolist())
            for number, counts in trained.items():
                assert set(counts) == set(range(SAMPLES)), f"{way}: samples of epoch {number} were lost"
            more = sum(counts.total() - SAMPLES for counts in trained.values())
            assert more == repeated, f"{way}: {more} samples were trained on again, not {repeated}"
            again += repeated
            print(f"{done} stops, {way}: {len(trained)} epochs complete, {repeated} samples again since a checkpoint")
    seconds = time.perf_counter() - started
    print(f"{done} stops in {seconds:.0f} s: nothing lost, {again} samples trained on again, as expected")


if __name__ == "__main__":
    main()
