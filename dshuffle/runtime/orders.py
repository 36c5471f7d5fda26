"""What the scheduler and other workers ask of a worker. :mod:`.message_fields` says how these messages travel.

A message may have something beside its fields that Dask sends by itself: a session, an error, or an array. It goes to
the method that carries the order out as an argument of its own.
"""

from __future__ import annotations

import msgspec

from dshuffle.planning.sample_digest import SampleDigest


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A message without fields."""


class SessionOrder(Order, frozen=True):
    """An order that concerns a session, whether it is open or not."""

    session_id: str


class Together(Order, frozen=True):
    """Ranks that load their partitions together, and addresses of the workers that read the store for them."""

    ranks: list[int] = []
    readers: list[str] = []


class OpenOrder(Order, frozen=True, rename={"digest": "drawn"}):
    """Open a session.

    Parameters
    ----------
    number
        Number of the order. Orders that were given before the session was closed here are refused.
    last_run
        Number of the last run that has begun elsewhere. The worker takes part in later ones only.
    restore
        Whether the worker takes a lost rank.
    epoch
        With ``restore``, the epoch whose partition is read; None if the first epoch has not begun.
    digest
        Digest of the samples of the rank in this epoch; None if it is not known.
    together
        With ``restore``, who loads together.
    """

    number: int
    last_run: int = 0
    restore: bool = False
    epoch: int | None = None
    digest: SampleDigest | None = None
    together: Together = Together()


class CloseOrder(SessionOrder, frozen=True):
    """Close a session, unless a later order has opened it. After it, orders to open up to this number are refused."""

    number: int


class MembersOrder(Order, frozen=True):
    """Use the addresses of workers that have taken lost ranks, unless a later order has been carried out.

    They are those of all participants that have moved since the session was opened, and not only of the last ones.
    """

    addresses: dict[int, str]
    number: int


class BeginOrder(Order, frozen=True):
    """Begin an attempt at an epoch's exchange.

    Parameters
    ----------
    run_id, epoch, delivery
        Number of the attempt, its epoch and its delivery.
    rate
        Rate of the workers' links in bytes per second, as far as it is known.
    """

    run_id: int
    epoch: int
    delivery: str
    rate: float | None


class PlanOrder(Order, frozen=True):
    """Plan the epoch after that of a run, with a delivery."""

    run_id: int
    delivery: str


class AbortOrder(Order, frozen=True):
    """Abort a run."""

    run_id: int


class CommitOrder(SessionOrder, frozen=True):
    """Swap to the epoch of a run."""

    run_id: int


class TrainedQuery(Order, frozen=True):
    """Which samples of an epoch have been trained on?"""

    epoch: int


class KeptQuery(Order, frozen=True):
    """Which partitions of a dataset are kept in a directory?"""

    directory: str
    dataset: str


class RowsQuery(SessionOrder, frozen=True):
    """Send rows of the partition of an epoch. The samples are beside the fields."""

    epoch: int


class BlockQuery(SessionOrder, frozen=True):
    """Send rows of a block of the store, whose numbers are beside the fields.

    Parameters
    ----------
    load
        Name of the load.
    owner, n_owners
        The participant that needs the rows, and how many take part in the load.
    block
        Number of the block. With -1, blocks are announced whose rows the participant will ask for.
    """

    load: str
    owner: int
    n_owners: int
    block: int


class MeanQuery(SessionOrder, frozen=True):
    """Wait for the mean of the values of all ranks. Those of one rank are beside the fields.

    Parameters
    ----------
    number, step
        Number of the call of :meth:`dshuffle.Epoch.together`, and of the mean in this call.
    size, rank, weight
        Number of ranks, and the rank and the weight of the values.
    """

    number: int
    step: int
    size: int
    rank: int
    weight: float


class EndCollectiveOrder(SessionOrder, frozen=True):
    """Fail the ranks that wait for a mean, and say whether another try may succeed."""

    number: int
    reason: str
    transient: bool = True
