"""Holder masks: one bit per worker for each sample, set if the worker caches the sample.

Holders are a ``(q, words)`` uint64 array with ``words = ceil(n / 64)``. Worker k caches sample j if bit ``k % 64`` of
``holders[j, k // 64]`` is set.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.exchange_epochs import Weights, share_sizes
from dshuffle.planning.types import Holders, Ranks


def as_holders(holders: ArrayLike, n_workers: int) -> Holders:
    """Convert holders to the form that planning uses.

    Parameters
    ----------
    holders
        ``(q, words)`` non-negative integers. For up to 64 workers, ``(q,)`` is allowed too.
    """
    masks = np.asarray(holders)
    words = -(-n_workers // 64)
    if masks.ndim == 1 and words == 1:
        masks = masks[:, np.newaxis]
    if masks.ndim != 2 or masks.shape[1] != words:
        raise InvalidParameter.of(
            "holders.shape",
            masks.shape,
            f"(n_samples, {words}) for {n_workers} workers",
            "Each word holds the bits of 64 workers.",
        )
    if not np.issubdtype(masks.dtype, np.integer) or (masks.dtype.kind == "i" and (masks < 0).any()):
        raise InvalidParameter.of(
            "holders.dtype", str(masks.dtype), "uint64, or an integer dtype without negative values"
        )
    masks = np.ascontiguousarray(masks, dtype=np.uint64)
    if n_workers % 64:
        beyond = np.flatnonzero(masks[:, -1] >> np.uint64(n_workers % 64))
        if beyond.size:
            raise InvalidParameter.of(
                f"holders[{beyond[0]}]",
                masks[beyond[0]].tolist(),
                f"a mask of workers 0 to {n_workers - 1}",
            )
    return masks


def as_instance(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> tuple[Holders, Ranks]:
    """Check where samples are and where they must go, as ``(q, words)`` uint64 and ``(q,)`` int32."""
    n_workers = as_integer("n_workers", n_workers, 1)
    masks = as_holders(holders, n_workers)
    ranks = as_ranks("destinations", destinations, n_workers)
    if len(masks) != len(ranks):
        raise InvalidParameter.of("destinations.shape", ranks.shape, f"({len(masks)},), to match holders")
    return masks, ranks


def holders_of(assignment: ArrayLike, n_workers: int) -> Holders:
    """Holders if every worker caches exactly its share."""
    ranks = as_ranks("assignment", assignment, n_workers)
    holders = np.zeros((len(ranks), -(-n_workers // 64)), dtype=np.uint64)
    add_holders(holders, ranks)
    return holders


def held_by(holders: Holders, worker: int) -> NDArray[np.bool_]:
    """``(q,)`` mask of the samples that a worker holds."""
    words = holders if holders.ndim == 1 else holders[:, worker // 64]
    held: NDArray[np.bool_] = (words & np.uint64(1 << worker % 64)) != 0
    return held


def largest_share(n_samples: int, n_workers: int, chunk_rows: int = 1, weights: Weights = ()) -> int:
    """Number of samples in the largest share, which is the same in every epoch.

    With weights and chunks it may be less, because a short chunk at the end belongs to any rank.
    """
    whole, short = divmod(n_samples, chunk_rows)
    if weights:
        return int(share_sizes(whole, weights).max()) * chunk_rows + short
    each, extra = divmod(whole, n_workers)
    return (each + 1) * chunk_rows if extra else each * chunk_rows + short


def cache_capacity(cache_fraction: float | None, n_samples: int, n_workers: int, *, chunk_rows: int = 1) -> int:
    """Number of samples that a worker may hold between epochs.

    It is ``floor(alpha * q)``, but at least the largest share.
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    partition = largest_share(n_samples, n_workers, chunk_rows)
    if cache_fraction is None:
        return partition
    hint = f"Each of the {n_workers} workers must hold its own share of the samples."
    alpha = as_ratio("cache_fraction", cache_fraction, Fraction(1, n_workers), hint)
    return max(partition, alpha.numerator * n_samples // alpha.denominator)


def has_excess(n_samples: int, n_workers: int, capacity: int) -> bool:
    """Whether workers with this capacity can hold more than their shares."""
    partition = -(-n_samples // n_workers)
    if capacity < partition:
        raise InvalidParameter.of("capacity", capacity, f"at least {partition}, the size of the largest share")
    return capacity > partition


@kernel("(u8[:,::1], i4[::1])")
def add_holders(holders, ranks):  # type: ignore[no-untyped-def]
    """Set the bit of worker ``ranks[j]`` for every sample j, in place."""
    for sample in range(ranks.size):
        rank = ranks[sample]
        holders[sample, rank >> 6] |= np.uint64(1) << np.uint64(rank & 63)
