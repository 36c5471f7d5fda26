"""Tasks that stop before all samples of an epoch are trained on."""

from __future__ import annotations

import itertools

import dshuffle


def some_batches(partition, count):
    """Train on some batches, or on all; the samples of those that count."""
    ids, first = [], 0
    for batch in itertools.islice(partition.batches(8, mark=True), count):
        ids += partition.sample_ids[first : first + len(batch["x"])].tolist()
        first += len(batch["x"])
    # A batch counts when the next one is asked for.
    return ids if count is None else ids[: max(0, (count - 1) * 8)]


def trained(client, epoch, counts):
    """The samples that count, of ranks that each train on some batches."""
    return client.gather(epoch.map(some_batches, dshuffle.PerRank(counts)))
