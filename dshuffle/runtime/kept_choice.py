"""Choose from which of the partitions that workers have kept on their disks a session reads its first ones."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.kept_partition import Listed
from dshuffle.planning import ShuffleSpec
from dshuffle.runtime.session_spec import Former

Found = Mapping[str, Sequence[Listed]]
"""Address of a worker -> the partitions in its directory. Workers on one machine may list the same ones."""


def choose_kept(
    found: Found, shuffle: str | None, plan: ShuffleSpec, workers: Sequence[str]
) -> tuple[Former, list[str]] | None:
    """Choose kept partitions, and the worker of each rank.

    The partitions are those of one epoch of one number of workers: of the epoch that has most of the samples; if there
    are several, of one with as many workers as there are now.

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

    Returns
    -------
    former, workers
        The partitions, and the workers by rank. A worker that has the partition of a rank gets this rank, if the number
        of workers is the same. None if there are no partitions of use.

    Examples
    --------
    >>> from dshuffle.exchange.kept_partition import KeptLabel
    >>> from dshuffle.planning import Choices
    >>> def kept(rank):
    ...     return Listed(f"folder-{rank}", KeptLabel("data", "global", 8, 5, n_workers=2, rank=rank, epoch=7))
    >>> found = {"tcp://a": [kept(1)], "tcp://b": [kept(0)]}
    >>> former, workers = choose_kept(found, "global", ShuffleSpec(10, 2, Choices()), ["tcp://a", "tcp://b"])
    >>> former.epoch, workers
    (7, ['tcp://b', 'tcp://a'])
    """
    groups: dict[tuple[int, int], dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for address in workers:
        for one in found.get(address, ()):
            label = one.label
            if label.shuffle == shuffle and label.rank < label.n_workers:
                groups[label.n_workers, label.epoch][label.rank][address] = one.name
    if not groups:
        return None

    def merit(group: tuple[int, int]) -> tuple[float, bool, int]:
        n_workers, epoch = group
        return len(groups[group]) / n_workers, n_workers == len(workers), epoch

    n_workers, epoch = max(groups, key=merit)
    try:
        former = dataclasses.replace(plan, n_workers=n_workers)
    except InvalidParameter:  # the sharding was given for the present number of workers
        return None
    partitions = groups[n_workers, epoch]
    ranks = _placed(partitions, workers) if n_workers == len(workers) else list(workers)
    holders, asked = {}, defaultdict[str, int](int)
    for rank, where in partitions.items():
        here = rank < len(ranks) and ranks[rank] in where
        address = ranks[rank] if here else min(where, key=lambda one: (asked[one], one))
        asked[address] += 1
        holders[rank] = address, where[address]
    return Former(epoch, holders, former, kept=True), ranks


def _placed(partitions: Mapping[int, Mapping[str, str]], workers: Sequence[str]) -> list[str]:
    """The workers by rank: those that have a partition get its rank, the others what is left, in their order."""
    ranks: dict[int, str] = {}
    for rank in sorted(partitions, key=lambda rank: (len(partitions[rank]), rank)):
        free = [address for address in workers if address in partitions[rank] and address not in ranks.values()]
        if free:
            ranks[rank] = free[0]
    others = (address for address in workers if address not in ranks.values())
    return [ranks[rank] if rank in ranks else next(others) for rank in range(len(workers))]
