"""Choose from which of the partitions that workers have kept on their disks a session reads its first ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.kept_partition import Listed
from dshuffle.planning import ShuffleSpec, WorkerHistory
from dshuffle.runtime.session_spec import Former

Found = Mapping[str, Sequence[Listed]]
"""Address of a worker -> the partitions in its directory. Workers on one machine may list the same ones."""


def choose_kept(
    found: Found, shuffle: str | None, plan: ShuffleSpec, workers: Sequence[str], history: WorkerHistory | None = None
) -> tuple[Former, list[str]] | None:
    """Choose kept partitions, and the worker of each rank.

    All chosen partitions belong to the same epoch and the same history of workers. The group with the largest part of
    the samples is chosen. Among equals, one with the wanted history comes first, then one with the present number of
    workers, then the latest epoch.

    Parameters
    ----------
    found
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
    >>> from dshuffle.exchange.kept_index import KeptLabel
    >>> from dshuffle.planning import Choices
    >>> def kept(rank):
    ...     return Listed(f"folder-{rank}", KeptLabel("data", "global", "1", 8, 5, WorkerHistory(2), rank, epoch=7))
    >>> found = {"tcp://a": [kept(1)], "tcp://b": [kept(0)]}
    >>> former, workers = choose_kept(found, "global", ShuffleSpec(10, 2, Choices()), ["tcp://a", "tcp://b"])
    >>> former.epoch, workers
    (7, ['tcp://b', 'tcp://a'])
    """
    groups: dict[tuple[WorkerHistory, int], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for address in workers:
        for one in found.get(address, ()):
            label = one.label
            if label.shuffle == shuffle and label.rank < label.history.n_workers:
                groups[label.history, label.epoch][label.rank][address] = one.name
    if not groups:
        return None

    def merit(group: tuple[WorkerHistory, int]) -> tuple[float, bool, bool, int]:
        theirs, epoch = group
        fraction = len(groups[group]) / theirs.n_workers
        return fraction, theirs == history, theirs.n_workers == len(workers), epoch

    of, epoch = max(groups, key=merit)
    try:
        former = plan.with_history(of, epoch)
    except InvalidParameter:  # the sharding was given for the present number of workers
        return None
    partitions = groups[of, epoch]
    ranks = _placed(partitions, workers)
    holders, asked = {}, defaultdict[str, int](int)
    for rank, where in partitions.items():
        here = rank < len(ranks) and ranks[rank] in where
        address = ranks[rank] if here else min(where, key=lambda one: (asked[one], one))
        asked[address] += 1
        holders[rank] = address, where[address]
    return Former(epoch, holders, former, kept=True), ranks


def _placed(partitions: Mapping[int, Mapping[str, str]], workers: Sequence[str]) -> list[str]:
    """The workers by rank. Those that have partitions get their ranks, and the others get what is left, in order."""
    ranks: dict[int, str] = {}
    placed: set[str] = set()
    here = [rank for rank in partitions if rank < len(workers)]
    for rank in sorted(here, key=lambda rank: (len(partitions[rank]), rank)):
        free = next((address for address in partitions[rank] if address not in placed), None)
        if free is not None:
            ranks[rank] = free
            placed.add(free)
    others = (address for address in workers if address not in placed)
    return [ranks[rank] if rank in ranks else next(others) for rank in range(len(workers))]
