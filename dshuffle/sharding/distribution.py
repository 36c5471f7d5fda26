"""Features read slab by slab: flat, as floats, and checked.

Distribution-aware sharding: the same neighbourhoods of the feature space on every worker.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.cluster import KMeans
from sklearn.decomposition import IncrementalPCA

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.planning import deal_groups, label_codes, random_words
from dshuffle.sharding.sharding import Sharding

Floats = NDArray[np.float32] | NDArray[np.float64]
Progress = Callable[[int, int, str], None]

SLAB_NBYTES = 16 << 20
"""Features are read in slabs of about so many bytes."""


class Sliceable(Protocol):
    """A NumPy or Dask array, or whatever gives rows ``[start:stop]`` as an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(q, ...)``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numbers."""

    def __getitem__(self, rows: slice, /) -> Any:
        """Consecutive rows."""


class Features:
    """The rows of an array as vectors.

    Parameters
    ----------
    source
        ``(q, ...)`` numbers. Rows are flattened; what is not float64 becomes float32.

    Raises
    ------
    InvalidParameter
        If it has no rows, or items that are no real numbers.
    """

    def __init__(self, source: Sliceable) -> None:
        shape, dtype = source.shape, np.dtype(source.dtype)
        if not shape or any(math.isnan(size) for size in shape) or math.prod(shape) == 0:
            raise InvalidParameter.of("features.shape", shape, "(n_samples, ...), none of them 0")
        if dtype.kind not in "fiub":
            raise InvalidParameter.of("features.dtype", str(dtype), "a dtype of real numbers")
        self._source = source
        self.n_samples = shape[0]
        self.width = math.prod(shape[1:])
        self.dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def slabs(self, least: int, text: str, progress: Progress | None) -> Iterator[tuple[int, Floats]]:
        """``(first sample, (rows, width) floats)``, of at least ``least`` rows if there are so many.

        Raises
        ------
        InvalidParameter
            Naming the first sample that has a feature which is not finite.
        """
        rows = max(least, SLAB_NBYTES // (self.width * self.dtype.itemsize), 1)
        count = max(1, self.n_samples // rows)
        bounds = [self.n_samples * slab // count for slab in range(count + 1)]
        for start, stop in itertools.pairwise(bounds):
            slab = np.asarray(self._source[start:stop]).reshape(stop - start, -1).astype(self.dtype, copy=False)
            bad = ~np.isfinite(slab).all(axis=1)
            if bad.any():
                raise InvalidParameter.of(
                    f"features[{start + int(bad.argmax())}]",
                    "a sample with features that are not finite",
                    "finite",
                    f"There are {np.count_nonzero(bad)} such samples among {start} to {stop - 1}; drop or fill them.",
                )
            yield start, slab
            if progress is not None:
                progress(stop, self.n_samples, text)


MOST_ITERATIONS = 150
STARTS = 3
MOST_COMPONENTS = 64
VARIANCE_KEPT = 0.95
SAMPLE_NBYTES = 64 << 20
"""K-means runs on a random sample of the dataset of about so many bytes after PCA, which is mostly all of it."""


def distribution_aware(
    features: Sliceable,
    labels: ArrayLike | None = None,
    *,
    n_workers: int,
    clusters: int | None = None,
    seed: int = 0,
    broadcast_cap: float = 0.05,
    progress: Progress | None = None,
) -> Sharding:
    """Find neighbourhoods by PCA and k-means, and deal each out to the workers in turn.

    Features are read two or three times, slab by slab, and may be larger than memory. K-means (at most 150 iterations)
    works on the principal components, at most 64 and as many as keep 95 % of the variance: of all samples if those fit
    64 MiB, else of a random sample that does, whose centres then decide for the rest.

    Parameters
    ----------
    features
        ``(q, ...)`` numbers: a NumPy or Dask array, or what gives rows ``[start:stop]``. Rows are flattened.
    labels
        ``(q,)`` integers; they only decide the default of ``clusters``.
    n_workers
        At most q.
    clusters
        Neighbourhoods to look for, at most q; by default twice the number of classes, as the paper recommends.
    seed
        Any integer.
    broadcast_cap
        The part of the dataset that may be broadcast, in [0, 1].
    progress
        Called as ``progress(samples read, samples, text)``.

    Returns
    -------
    Sharding
        Of each neighbourhood, and of all samples, workers get equally many or one more. To broadcast are those
        neighbourhoods that have no more samples than there are workers.

    Raises
    ------
    InvalidParameter
        If features are not finite (the message names the sample), labels have another length or are no classes,
        ``clusters`` is larger than q, or more would be broadcast than the cap allows (the message says which
        ``clusters`` to choose).

    Warns
    -----
    ShardingWarning
        If some neighbourhoods are to be broadcast; the message counts them.

    References
    ----------
    Paper 002, section III-B and Fig. 6; section IV-D on how many neighbourhoods to choose.

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
    clusters = _n_clusters(clusters, labels, q)
    pca, n_components = _reduce(data, progress)
    neighbourhoods = _neighbourhoods(data, pca, n_components, clusters, seed, progress)
    sizes = np.bincount(neighbourhoods, minlength=clusters)
    sparse = (sizes <= n_workers) & (sizes > 0)
    broadcast = np.flatnonzero(sparse[neighbourhoods])
    _check_broadcast(len(broadcast), sizes, clusters, n_workers, broadcast_cap)
    if len(broadcast):
        warnings.warn(
            f"{np.count_nonzero(sparse)} of {clusters} neighbourhoods have no more samples than there are workers "
            f"({n_workers}): {len(broadcast)} samples are to be broadcast",
            ShardingWarning,
            stacklevel=2,
        )
    # Those to broadcast come last, so that partition sizes without them differ by one at most as well.
    turns = np.argsort(np.argsort(sparse, kind="stable"), kind="stable").astype(np.int32)
    ranks = deal_groups(turns[neighbourhoods], clusters, n_workers, "distribution-aware", seed)
    return Sharding(ranks, n_workers, broadcast, np.sort(sizes)[::-1])


def _n_clusters(clusters: int | None, labels: ArrayLike | None, n_samples: int) -> int:
    codes_and_classes = None if labels is None else label_codes(labels, n_samples)
    if clusters is None:
        if codes_and_classes is None:
            raise InvalidParameter.of("clusters", None, "an integer >= 1 without labels", "Labels give a default.")
        return min(2 * len(codes_and_classes[1]), n_samples)
    clusters = as_integer("clusters", clusters, 1)
    if clusters > n_samples:
        raise InvalidParameter.of("clusters", clusters, f"at most {n_samples}, the number of samples")
    return clusters


def _reduce(data: Features, progress: Progress | None) -> tuple[IncrementalPCA, int]:
    """PCA in one pass, and how many components are worth keeping."""
    most = min(MOST_COMPONENTS, data.width, data.n_samples)
    pca = IncrementalPCA(n_components=most)
    with np.errstate(divide="ignore", invalid="ignore"):  # of a single row, or of rows that are all the same
        for _, slab in data.slabs(most, "samples read for PCA", progress):
            pca.partial_fit(slab)
    kept = np.cumsum(np.nan_to_num(pca.explained_variance_ratio_))
    return pca, min(most, int(np.searchsorted(kept, VARIANCE_KEPT)) + 1)


def _neighbourhoods(
    data: Features, pca: IncrementalPCA, n_components: int, clusters: int, seed: int, progress: Progress | None
) -> NDArray[np.int32]:
    """``(q,)``: the nearest of the centres that k-means finds on as many samples as fit."""
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
        hint = "K-means works on a random sample of a dataset of this size."
        raise InvalidParameter.of("clusters", clusters, f"at most {len(sample) // 2}", hint)
    kmeans = KMeans(
        clusters, max_iter=MOST_ITERATIONS, n_init=STARTS, random_state=int(random_words(1, "k-means", seed)[0] >> 32)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer distinct samples than clusters: some neighbourhoods stay empty
        kmeans.fit(sample)
    if len(sample) == data.n_samples:
        return np.asarray(kmeans.labels_, dtype=np.int32)
    del sample
    neighbourhoods = np.empty(data.n_samples, dtype=np.int32)
    for start, slab in data.slabs(1, "samples given to neighbourhoods", progress):
        neighbourhoods[start : start + len(slab)] = kmeans.predict(reduced(slab))
    return neighbourhoods


def _check_broadcast(
    n_broadcast: int, sizes: NDArray[np.int64], clusters: int, n_workers: int, broadcast_cap: float
) -> None:
    n_samples = int(sizes.sum())
    if n_broadcast <= broadcast_cap * n_samples:
        return
    # As many as are dense now, but not so many that an average one has less than two samples for each worker.
    dense = int(np.count_nonzero(sizes > n_workers))
    better = max(1, min(dense, clusters - 1, n_samples // (2 * n_workers)))
    raise InvalidParameter.of(
        "clusters",
        clusters,
        f"such that at most {broadcast_cap:.3g} of the {n_samples} samples are broadcast",
        f"{n_broadcast} would be: {clusters - dense} neighbourhoods have no more samples than there are workers "
        f"({n_workers}). Try clusters={better}, or fewer; or raise broadcast_cap.",
    )
