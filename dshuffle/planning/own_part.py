"""A worker's part of an epoch, planned by that worker alone.

Where ranks are functions (see :mod:`dshuffle.planning.assignment.blocks`) and caches hold nothing but shares, a worker
can find out what it receives and sends without planning for the others: it looks up where its next samples are now,
and where its present samples go. Time and memory are O(q / n), and no epoch before is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dshuffle.planning.assignment.blocks import Blocks
from dshuffle.planning.delivery import get_delivery
from dshuffle.planning.epoch_plan import WorkerPart, split_by_worker
from dshuffle.planning.order import epoch_permutation
from dshuffle.planning.packets import STORE
from dshuffle.planning.planner import ShuffleSpec
from dshuffle.planning.types import Samples


def blocks_of(spec: ShuffleSpec, epoch: int) -> Blocks | None:
    """The ranks of an epoch as a function; None if they depend on the epochs before, on labels, or on given ranks."""
    choices = spec.choices
    if choices.balance is not None or spec.n_broadcast:
        return None
    if epoch == 0 or not choices.assignment.moves:
        return choices.assignment.first_blocks(choices.sharding, spec.n_samples, spec.n_workers, choices.seed)
    return choices.assignment.blocks(spec.n_samples, spec.n_workers, choices.seed, epoch)


def plans_own_parts(spec: ShuffleSpec, delivery: str) -> bool:
    """Whether every worker can plan its own part of each epoch."""
    found = get_delivery(delivery)
    if spec.has_excess or found.needs_server:
        return False
    return blocks_of(spec, 0) is not None and blocks_of(spec, 1) is not None


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A worker's part of an epoch, and the sizes of the smallest and the largest share.

    Parameters
    ----------
    part
        What the worker trains on, receives and sends.
    shares
        Smallest and largest number of samples that a worker trains on.
    """

    part: WorkerPart
    shares: tuple[int, int]

    @property
    def n_received(self) -> int:
        """Samples that the worker receives or reads."""
        return sum(map(len, self.part.receives.values()))

    @property
    def n_sent(self) -> int:
        """Samples that the worker sends."""
        return sum(map(len, self.part.sends.values()))


def plan_own_part(spec: ShuffleSpec, rank: int, epoch: int, delivery: str) -> OwnPart:
    """Plan the part of one worker; :func:`plans_own_parts` says whether that is possible.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> spec = ShuffleSpec(1000, 4, Choices("global", sharding="contiguous"))
    >>> own = plan_own_part(spec, rank=2, epoch=10**6, delivery="peer")
    >>> len(own.part.own), own.n_received == sum(map(len, own.part.receives.values())), 2 in own.part.receives
    (250, True, False)
    """
    blocks = blocks_of(spec, epoch)
    assert blocks is not None
    own = blocks.samples_of(rank)
    receives: dict[int, Samples] = {}
    sends: dict[int, Samples] = {}
    if epoch == 0:
        receives = {STORE: own}
    elif spec.choices.assignment.moves:
        before = blocks_of(spec, epoch - 1)
        assert before is not None
        now = before.ranks_of(own)
        missing = now != rank
        if get_delivery(delivery).reads_store:
            receives = {STORE: own[missing]} if missing.any() else {}
        else:
            receives = split_by_worker(own[missing], now[missing], spec.n_workers)
            held = before.samples_of(rank)
            later = blocks.ranks_of(held)
            leaving = later != rank
            sends = split_by_worker(held[leaving], later[leaving], spec.n_workers)
    order = epoch_permutation(len(own), seed=spec.choices.seed, epoch=epoch, rank=rank)
    part = WorkerPart(rank, epoch, own, order, own, receives, sends)
    return OwnPart(part, blocks.shares)
