"""Distribution-aware sharding: spread each neighbourhood of the feature space over all workers."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import KMeans
from sklearn.decomposition import IncrementalPCA

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning.assignment.balance import deal_groups, label_codes
from dshuffle.planning.randomness import random_words
from dshuffle.sharding.sharding import Sharding

Floats = NDArray[np.float32] | NDArray[np.float64]
Progress = Callable[[int, int, str], None]

SLAB_NBYTES = 16 << 20
"""Approximate size of a slab of features, in bytes."""


class Features:
    """The rows of an array ``(q, ...)`` as vectors. All dtypes except float64 are converted to float32."""

    def __init__(self, source: Any) -> None:
        shape, dtype = source.shape, np.dtype(source.dtype)
        if not shape or any(math.isnan(size) for size in shape) or math.prod(shape) == 0:
            raise InvalidParameter.of("features.shape", shape, "(n_samples, ...) with known sizes above 0")
        if dtype.kind not in "fiub":
            raise InvalidParameter.of("features.dtype", str(dtype), "a dtype of real numbers")
        self._source = source
        self.n_samples, self.width = shape[0], math.prod(shape[1:])
        self.dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def slabs(self, least: int, text: str, progress: Progress | None) -> Iterator[tuple[int, Floats]]:
        """Yield ``(first sample, (rows, width) floats)``, with at least ``least`` rows if the array has that many."""
        rows = max(least, SLAB_NBYTES // (self.width * self.dtype.itemsize), 1)
        count = max(1, self.n_samples // rows)
        bounds = [self.n_samples * slab // count for slab in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            slab = np.asarray(self._source[start:stop]).reshape(stop - start, -1).astype(self.dtype, copy=False)
            bad = ~np.isfinite(slab).all(axis=1)
            if bad.any():
                raise InvalidParameter.because(
                    f"features[{start + int(bad.argmax())}]",
                    "it has values that are not finite",
                    f"{np.count_nonzero(bad)} of samples {start} to {stop - 1} have such values; drop or fill them.",
                )
            yield start, slab
            if progress is not None:
                progress(stop, self.n_samples, text)


MOST_ITERATIONS = 150
STARTS = 3
MOST_COMPONENTS = 64
VARIANCE_KEPT = 0.95
SAMPLE_NBYTES = 64 << 20
"""Approximate size in bytes, after PCA, of the samples that k-means runs on; larger datasets are subsampled."""


def distribution_aware(
    features: Any,
    labels: ArrayLike | None = None,
    *,
    n_workers: int,
    clusters: int | None = None,
    seed: int = 0,
    broadcast_cap: float = 0.05,
    progress: Progress | None = None,
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
    progress
        Called as ``progress(samples read, samples, text)``.

    Returns
    -------
    Sharding
        The number of samples per worker differs by at most one, for each neighbourhood and in total. Neighbourhoods
        with at most ``n_workers`` samples are broadcast.

    Raises
    ------
    InvalidParameter
        If features are not finite (the message names the sample), labels have another length or are not classes,
        ``clusters`` is larger than q, or more samples would be broadcast than the cap allows (the message suggests a
        value of ``clusters``).

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
    data = Features(features)
    q = data.n_samples
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
    neighbourhoods = _neighbourhoods(data, clusters, seed, progress)
    sizes = np.bincount(neighbourhoods, minlength=clusters)
    sparse = (sizes <= n_workers) & (sizes > 0)
    broadcast = np.flatnonzero(sparse[neighbourhoods])
    _check_broadcast(len(broadcast), sizes, clusters, n_workers, broadcast_cap)
    if len(broadcast):
        warnings.warn(
            f"{np.count_nonzero(sparse)} of {clusters} neighbourhoods have at most {n_workers} samples, the number of "
            f"workers: {len(broadcast)} samples will be broadcast",
            ShardingWarning,
            stacklevel=2,
        )
    # Broadcast samples are dealt last, so that partition sizes without them also differ by at most one.
    turns = np.argsort(np.argsort(sparse, kind="stable"), kind="stable").astype(np.int32)
    ranks = deal_groups(turns[neighbourhoods], clusters, n_workers, "distribution-aware", seed)
    return Sharding(ranks, n_workers, broadcast, np.sort(sizes)[::-1])


def _neighbourhoods(data: Features, clusters: int, seed: int, progress: Progress | None) -> NDArray[np.int32]:
    """``(q,)``: the neighbourhood (nearest k-means centre) of each sample."""
    most = min(MOST_COMPONENTS, data.width, data.n_samples)
    pca = IncrementalPCA(n_components=most)
    with np.errstate(divide="ignore", invalid="ignore"):  # a single row, or identical rows
        for _, slab in data.slabs(most, "samples read for PCA", progress):
            pca.partial_fit(slab)
    kept = np.cumsum(np.nan_to_num(pca.explained_variance_ratio_))
    n_components = min(most, int(np.searchsorted(kept, VARIANCE_KEPT)) + 1)
    axes = np.ascontiguousarray(pca.components_[:n_components].T, dtype=data.dtype)
    mean = pca.mean_.astype(data.dtype)

    def reduced(slab: Floats) -> Floats:
        components: Floats = (slab - mean) @ axes
        return components

    part = min(1.0, max(SAMPLE_NBYTES / (axes.itemsize * n_components), clusters) / data.n_samples)
    pieces = []
    for start, slab in data.slabs(1, "samples read for k-means", progress):
        rows = slab
        if part < 1:
            rows = slab[random_words(len(slab), "k-means sample", seed, start) < np.uint64(part * 2.0**64)]
        pieces.append(reduced(rows))
    sample = np.concatenate(pieces)
    del pieces
    if len(sample) < clusters:
        hint = "K-means runs on a random subset of a dataset of this size."
        raise InvalidParameter.of("clusters", clusters, f"at most {len(sample) // 2}", hint)
    kmeans = KMeans(
        clusters, max_iter=MOST_ITERATIONS, n_init=STARTS, random_state=int(random_words(1, "k-means", seed)[0] >> 32)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with fewer distinct samples than clusters some neighbourhoods stay empty
        kmeans.fit(sample)
    if len(sample) == data.n_samples:
        return np.asarray(kmeans.labels_, dtype=np.int32)
    del sample
    neighbourhoods = np.empty(data.n_samples, dtype=np.int32)
    for start, slab in data.slabs(1, "samples assigned to neighbourhoods", progress):
        neighbourhoods[start : start + len(slab)] = kmeans.predict(reduced(slab))
    return neighbourhoods


def _check_broadcast(
    n_broadcast: int, sizes: NDArray[np.int64], clusters: int, n_workers: int, broadcast_cap: float
) -> None:
    n_samples = int(sizes.sum())
    if n_broadcast <= broadcast_cap * n_samples:
        return
    # The number of dense clusters now, limited so that the average cluster has at least two samples per worker.
    dense = int(np.count_nonzero(sizes > n_workers))
    better = max(1, min(dense, clusters - 1, n_samples // (2 * n_workers)))
    raise InvalidParameter.of(
        "clusters",
        clusters,
        f"small enough that at most {broadcast_cap:.3g} of the {n_samples} samples are broadcast",
        f"{n_broadcast} samples would be broadcast: {clusters - dense} neighbourhoods have at most {n_workers} "
        f"samples, the number of workers. Try clusters={better}, or fewer, or raise broadcast_cap.",
    )
