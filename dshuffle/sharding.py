"""First assignments computed offline from labels and features, before a session starts."""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning.assignment.balance import deal_classes, deal_groups, label_codes
from dshuffle.planning.randomness import random_words
from dshuffle.planning.types import Ranks, Samples

__all__ = ["Sharding", "ShardingWarning", "distribution_aware", "stratified"]

SLAB_NBYTES = 16 << 20
"""Approximate size of a slab of features, in bytes."""

MOST_ITERATIONS = 150
STARTS = 3
MOST_COMPONENTS = 64
VARIANCE_KEPT = 0.95
SAMPLE_NBYTES = 64 << 20
"""Approximate size in bytes, after PCA, of the samples that k-means runs on; larger datasets are subsampled."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A first assignment computed offline.

    Parameters
    ----------
    ranks
        ``(q,)`` int32: the worker of each sample. Partition sizes differ by at most one, with and without the
        broadcast samples.
    n_workers
        Number of workers.
    broadcast
        Ascending int64: the samples that every worker trains on. In a session (``Shuffler(sharding=...)`` with this
        object or with the name of a stored sharding) every worker holds them in every epoch. They are the only
        exception to training on each sample exactly once. Each of them has a rank as well; pass ``ranks`` alone to
        broadcast nothing.
    neighbourhoods
        ``(k,)`` int64, descending: number of samples in each neighbourhood, for a distribution-aware sharding.

    References
    ----------
    Provatas et al. (2021), section III-B, on broadcast samples; see docs/papers.md.

    Examples
    --------
    >>> Sharding(np.array([0, 1, 0], np.int32), 2, broadcast=np.array([2])).broadcast
    array([2])
    """

    ranks: Ranks
    n_workers: int
    broadcast: Samples
    neighbourhoods: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        as_ranks("ranks", self.ranks, self.n_workers)
        if len(self.broadcast) and not 0 <= self.broadcast.min() <= self.broadcast.max() < len(self.ranks):
            raise InvalidParameter.of("broadcast", self.broadcast, f"samples in [0, {len(self.ranks)})")


def stratified(labels: ArrayLike, n_workers: int, *, seed: int = 0) -> Ranks:
    """Deal the samples of each class to the workers in turn.

    Parameters
    ----------
    labels
        ``(q,)`` integers, the class of each sample.
    n_workers
        Number of workers, at most q.
    seed
        Seed of the random order, any integer.

    Returns
    -------
    (q,) int32
        The worker of each sample. The number of samples per worker differs by at most one, for each class and in
        total.

    Raises
    ------
    InvalidParameter
        If labels are not one-dimensional, not integers or all distinct, or if there are fewer samples than workers.

    Warns
    -----
    ShardingWarning
        If a class has fewer samples than there are workers, so that some workers do not get any of them.

    References
    ----------
    Provatas et al. (2021), section III-A and Fig. 4; see docs/papers.md.

    Examples
    --------
    >>> stratified([3, 3, 8, 8], 2)
    array([0, 1, 0, 1], dtype=int32)
    """
    codes, classes = label_codes(labels)
    ranks = deal_classes(codes, len(classes), n_workers, seed=seed)
    sizes = np.bincount(codes)
    if n_small := np.count_nonzero(sizes < n_workers):
        warnings.warn(
            f"{n_small} of {len(classes)} classes have fewer samples than there are workers ({n_workers}), so some "
            f"workers get no samples of them; the smallest is {classes[sizes.argmin()]} with {sizes.min()} samples",
            ShardingWarning,
            stacklevel=2,
        )
    return ranks


def distribution_aware(
    features: Any,
    labels: ArrayLike | None = None,
    *,
    n_workers: int,
    clusters: int | None = None,
    seed: int = 0,
    broadcast_cap: float = 0.05,
) -> Sharding:
    """Find neighbourhoods with PCA and k-means, and deal the samples of each to the workers in turn.

    Features are read two or three times in slabs and may be larger than memory. PCA keeps enough components for 95 %
    of the variance, at most 64. K-means runs at most 150 iterations on these components. It uses all samples if they
    fit in 64 MiB. Otherwise it uses a random subset that fits, and every sample joins the nearest centre.

    Parameters
    ----------
    features
        ``(q, ...)`` numbers: a NumPy or Dask array, or any object that returns rows ``[start:stop]``. Rows are
        flattened.
    labels
        ``(q,)`` integers, used only for the default of ``clusters``.
    n_workers
        Number of workers, at most q.
    clusters
        Number of neighbourhoods, at most q. By default twice the number of classes, as the paper recommends.
    seed
        Seed of k-means and of the random order, any integer.
    broadcast_cap
        Largest fraction of the dataset that may be broadcast, in [0, 1].

    Returns
    -------
    Sharding
        The number of samples per worker differs by at most one, for each neighbourhood and in total. Neighbourhoods
        with at most ``n_workers`` samples are broadcast.

    Raises
    ------
    InvalidParameter
        If features are not finite (the message names the sample), labels have another length or are not classes,
        ``clusters`` is larger than q, or more samples would be broadcast than the cap allows.

    Warns
    -----
    ShardingWarning
        If some neighbourhoods are broadcast; the message gives their number.

    References
    ----------
    Provatas et al. (2021), section III-B and Fig. 6; section IV-G on the number of neighbourhoods. See docs/papers.md.

    Examples
    --------
    >>> features = np.repeat([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]], 40, axis=0)
    >>> sharding = distribution_aware(features, n_workers=4, clusters=3)
    >>> sharding.neighbourhoods
    array([40, 40, 40])
    >>> [int(np.sum(sharding.ranks[:40] == worker)) for worker in range(4)]
    [10, 10, 10, 10]
    """
    shape, dtype = features.shape, np.dtype(features.dtype)
    if not shape or any(math.isnan(size) for size in shape) or math.prod(shape) == 0:
        raise InvalidParameter.of("features.shape", shape, "(n_samples, ...) with known sizes above 0")
    if dtype.kind not in "fiub":
        raise InvalidParameter.of("features.dtype", str(dtype), "a dtype of real numbers")
    q = shape[0]
    n_workers = as_integer("n_workers", n_workers, 1)
    as_integer("n_samples", q, n_workers, "There are fewer samples than workers.")
    if not 0 <= broadcast_cap <= 1:
        raise InvalidParameter.of("broadcast_cap", broadcast_cap, "a number in [0, 1]")
    classes = () if labels is None else label_codes(labels, q)[1]
    if clusters is None and labels is None:
        raise InvalidParameter.of("clusters", None, "an integer >= 1", "Give labels to get a default.")
    clusters = min(2 * len(classes), q) if clusters is None else as_integer("clusters", clusters, 1)
    if clusters > q:
        raise InvalidParameter.of("clusters", clusters, f"at most {q}, the number of samples")
    neighbourhoods = _neighbourhoods(features, clusters, seed)
    sizes = np.bincount(neighbourhoods, minlength=clusters)
    sparse = (sizes <= n_workers) & (sizes > 0)
    broadcast = np.flatnonzero(sparse[neighbourhoods])
    if len(broadcast):
        said = (
            f"{len(broadcast)} samples are broadcast, because they are in neighbourhoods with at most {n_workers} "
            "samples, the number of workers"
        )
        if len(broadcast) > broadcast_cap * q:
            allowed = f"small enough that at most {broadcast_cap:.3g} of the {q} samples are broadcast"
            hint = f"With it, {said}. Try fewer clusters, or raise broadcast_cap."
            raise InvalidParameter.of("clusters", clusters, allowed, hint)
        warnings.warn(said, ShardingWarning, stacklevel=2)
    # Broadcast samples are dealt last, so that partition sizes without them also differ by at most one.
    turns = np.argsort(np.argsort(sparse, kind="stable"), kind="stable").astype(np.int32)
    ranks = deal_groups(turns[neighbourhoods], clusters, n_workers, "distribution-aware", seed)
    return Sharding(ranks, n_workers, broadcast, np.sort(sizes)[::-1])


def _neighbourhoods(features: Any, clusters: int, seed: int) -> NDArray[np.int32]:
    """``(q,)``: the neighbourhood (nearest k-means centre) of each sample."""
    q, width = features.shape[0], math.prod(features.shape[1:])
    dtype = np.dtype(np.float64 if features.dtype == np.float64 else np.float32)
    most = min(MOST_COMPONENTS, width, q)

    def slabs(least: int = 1) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield ``(first sample, (rows, width) floats)``, with at least ``least`` rows if there are that many."""
        count = max(1, q // max(least, SLAB_NBYTES // (width * dtype.itemsize)))
        for start, stop in itertools.pairwise(q * slab // count for slab in range(count + 1)):
            rows = np.asarray(features[start:stop]).reshape(stop - start, -1).astype(dtype, copy=False)
            bad = ~np.isfinite(rows).all(axis=1)
            if bad.any():
                name, hint = f"features[{start + bad.argmax()}]", "Drop or fill such samples."
                raise InvalidParameter.because(name, "it has values that are not finite", hint)
            yield start, rows

    pca = importlib.import_module("sklearn.decomposition").IncrementalPCA(n_components=most)
    with np.errstate(divide="ignore", invalid="ignore"):  # a single row, or identical rows
        for _, rows in slabs(most):
            pca.partial_fit(rows)
    kept = np.cumsum(np.nan_to_num(pca.explained_variance_ratio_))
    n_components = min(most, int(np.searchsorted(kept, VARIANCE_KEPT)) + 1)
    axes = np.ascontiguousarray(pca.components_[:n_components].T, dtype=dtype)
    mean = pca.mean_.astype(dtype)
    part = min(1.0, max(SAMPLE_NBYTES / (dtype.itemsize * n_components), clusters) / q)
    pieces = []
    for start, rows in slabs():
        if part < 1:
            rows = rows[random_words(len(rows), "k-means sample", seed, start) < np.uint64(part * 2.0**64)]
        pieces.append((rows - mean) @ axes)
    sample = np.concatenate(pieces)
    del pieces
    kmeans = importlib.import_module("sklearn.cluster").KMeans(
        clusters, max_iter=MOST_ITERATIONS, n_init=STARTS, random_state=int(random_words(1, "k-means", seed)[0] >> 32)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with fewer distinct samples than clusters some neighbourhoods stay empty
        kmeans.fit(sample)
    if len(sample) == q:
        return np.asarray(kmeans.labels_, dtype=np.int32)
    del sample
    neighbourhoods = np.empty(q, dtype=np.int32)
    for start, rows in slabs():
        neighbourhoods[start : start + len(rows)] = kmeans.predict((rows - mean) @ axes)
    return neighbourhoods
