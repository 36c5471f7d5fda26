"""The order in which rows on a disk are sent. It is the order of training, in which the disk reads them fastest.

A worker stores the rows of an epoch in the order of training. It sends them in this order in the next exchange.
Receivers can compute the order. Where there is room, rows that stay also move, so that all rows are in the order of the
next epoch.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dshuffle.planning.epoch_plan import WorkerPart
from dshuffle.planning.order import epoch_order
from dshuffle.planning.packets import STORE
from dshuffle.planning.types import Samples


def in_disk_order(part: WorkerPart, *, seed: int, stored: int | None, moves_within: bool) -> WorkerPart:
    """The same part of an exchange, with samples in the order in which they are stored on their senders' disks.

    Parameters
    ----------
    part
        A worker's part of an exchange without packets.
    seed
        Seed of the session.
    stored
        The epoch in whose order of training rows are stored: the last one with an exchange. None after the first epoch,
        in which rows were read from the store in ascending order.
    moves_within
        Whether rows that stay are sent from the worker to itself, so that they get new slots.

    Examples
    --------
    >>> own, part = np.arange(4), {1: np.array([3])}
    >>> part = WorkerPart(0, 1, own, own, own, receives=part, sends={1: np.array([5, 6, 7, 8])})
    >>> moved = in_disk_order(part, seed=0, stored=0, moves_within=True)
    >>> moved.sends[1].tolist(), sorted(moved.receives[0].tolist()), moved.sends[0] is moved.receives[0]
    ([6, 5, 8, 7], [0, 1, 2], True)
    """

    def ordered(sender: int, samples: Samples) -> Samples:
        if stored is None or sender < 0:
            return samples
        return epoch_order(samples, seed=seed, epoch=stored, rank=sender)

    sends = {other: ordered(part.rank, samples) for other, samples in part.sends.items()}
    receives = {other: ordered(other, samples) for other, samples in part.receives.items()}
    if moves_within and receives and STORE not in receives:
        arriving = np.concatenate([part.own[:0], *receives.values()])
        staying = part.own[~np.isin(part.own, arriving)]
        if len(staying):
            sends[part.rank] = receives[part.rank] = ordered(part.rank, staying)
    return dataclasses.replace(part, sends=sends, receives=receives)
