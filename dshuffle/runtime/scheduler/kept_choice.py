"""Choose from which of the partitions that workers have kept on their disks a session reads its first ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.kept_partition import KeptFolder
from dshuffle.planning import ShuffleSpec, WorkerHistory
from dshuffle.runtime.session_spec import PartitionSources

KeptPartitions = Mapping[str, Sequence[KeptFolder]]
"""Address of a worker -> the partitions in its directory. Workers on one machine may list the same ones."""


def choose_kept(
    kept: KeptPartitions,
    shuffle: str | None,
    plan: ShuffleSpec,
    workers: Sequence[str],
    history: WorkerHistory | None = None,
) -> tuple[PartitionSources, list[str]] | None:
    """Choose kept partitions, and the worker of each rank.

    All chosen partitions belong to the same epoch and the same history of workers. The group with the largest part of
    the samples is chosen. Among equals, one with this history comes first, then one with the present number of
    workers, then the latest epoch.

    Parameters
    ----------
    kept
        What each worker has.
    shuffle
        Digest of the way of shuffling. Other partitions are ignored.
    plan
        What ranks depend on.
    workers
        Addresses of the workers that train, by rank.
    history
        The workers of the session that is resumed.

    Returns
    -------
    former, workers
        The partitions, and the workers by rank. A worker gets a rank whose partition it has, if it has one. None if no
        partition can be used.

    Examples
    --------
    >>> from dshuffle.exchange.kept_partition import KeptLabel
    >>> from dshuffle.planning import Choices
    >>> def partition(rank):
    ...     return KeptFolder(f"folder-{rank}", KeptLabel("data", "global", "1", 8, 5, WorkerHistory(2), rank, epoch=7))
    >>> kept = {"tcp://a": [partition(1)], "tcp://b": [partition(0)]}
    >>> former, workers = choose_kept(kept, "global", ShuffleSpec(10, 2, Choices()), ["tcp://a", "tcp://b"])
    >>> former.epoch, workers
    (7, ['tcp://b', 'tcp://a'])
    """
    groups: dict[tuple[WorkerHistory, int], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for address in workers:
        for partition in kept.get(address, ()):
            label = partition.label
            if label.shuffle == shuffle and label.rank < label.history.n_workers:
                groups[label.history, label.epoch][label.rank][address] = partition.name
    if not groups:
        return None

    def merit(group: tuple[WorkerHistory, int]) -> tuple[float, bool, bool, int]:
        group_history, epoch = group
        fraction = len(groups[group]) / group_history.n_workers
        return fraction, group_history == history, group_history.n_workers == len(workers), epoch

    best_history, epoch = max(groups, key=merit)
    try:
        former = plan.with_history(best_history, epoch)
    except InvalidParameter:  # the sharding was given for the present number of workers
        return None
    partitions = groups[best_history, epoch]
    ranks = _placed(partitions, workers)
    holders, asked = {}, defaultdict[str, int](int)
    for rank, where in partitions.items():
        is_holder = rank < len(ranks) and ranks[rank] in where
        address = ranks[rank] if is_holder else min(where, key=lambda holder: (asked[holder], holder))
        asked[address] += 1
        holders[rank] = address, where[address]
    return PartitionSources(epoch, holders, former, kept=True), ranks


def _placed(partitions: Mapping[int, Mapping[str, str]], workers: Sequence[str]) -> list[str]:
    """The workers by rank. Those that have partitions get their ranks, and the others get what is left, in order."""
    ranks: dict[int, str] = {}
    placed: set[str] = set()
    usable = [rank for rank in partitions if rank < len(workers)]
    for rank in sorted(usable, key=lambda rank: (len(partitions[rank]), rank)):
        free = next((address for address in partitions[rank] if address not in placed), None)
        if free is not None:
            ranks[rank] = free
            placed.add(free)
    unplaced = (address for address in workers if address not in placed)
    return [ranks[rank] if rank in ranks else next(unplaced) for rank in range(len(workers))]
