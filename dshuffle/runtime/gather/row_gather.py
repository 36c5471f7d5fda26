"""``dshuffle.permute`` and ``dshuffle.take``: rows that are shuffled or picked, and the plan of their transfers."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import dask.array
import numpy as np
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, futures_of, wait
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning import row_permutation
from dshuffle.runtime.client.cluster_view import check_client, cluster_info
from dshuffle.runtime.gather import Ranges, merge_pieces, requested, split_rows

GROUP_BYTES = 64 * 2**20
"""Bytes of output that one task merges, or one chunk if that is larger."""


def check_array(client: Client, array: Any) -> None:
    """Check that an array has rows that can be moved."""
    check_client(client)
    if not isinstance(array, dask.array.Array):
        hint = "Use dask.array.from_array for an array in memory, and dask.array.from_zarr for an array of a dataset."
        reason = f"it is of type {type(array).__name__}, not a dask.array.Array"
        raise InvalidParameter.because("data", reason, hint)
    if array.ndim == 0:
        raise InvalidParameter.of("data.shape", array.shape, "a shape with at least one axis")
    if any(math.isnan(size) for size in itertools.chain.from_iterable(array.chunks)):
        raise InvalidParameter.of("data.chunks", array.chunks, "known sizes", "Call data.compute_chunk_sizes() first.")
    if type(array._meta) is not np.ndarray:
        reason = f"its chunks are of type {type(array._meta).__name__}, not NumPy arrays"
        raise InvalidParameter.because("data", reason, "Convert them to NumPy arrays first.")
    if array.dtype.hasobject:
        hint = "Cast the array, or encode its items as numbers."
        raise InvalidParameter.of("data.dtype", str(array.dtype), "a dtype of fixed size", hint)


def gather(client: Client, array: dask.array.Array, chunk_rows: Sequence[int], order: Any) -> dask.array.Array:
    """Start the tasks, each on the worker that holds its input or output.

    A lazy array is computed, and its chunks are merged along other axes. Row k of the result is row ``order[k]`` of it.
    The order is a future, or a task.
    """
    workers = sorted(cluster_info(client)["workers"])
    if not workers:
        raise ClusterError(
            "the Dask cluster does not have any workers; start some and wait for them with client.wait_for_workers"
        )
    array = client.persist(array.rechunk({axis: -1 for axis in range(1, array.ndim)}))
    futures = {future.key: future for future in futures_of(array)}
    wait(list(futures.values()))
    for future in futures.values():
        if future.status == "error":
            future.result()
    holders = client.who_has(list(futures.values()))
    # The chunks that each worker holds are a part of the input, which one task splits.
    chunks: dict[str, list[Future[Any]]] = defaultdict(list)
    ranges: dict[str, Ranges] = defaultdict(list)
    shape, other_axes = array.shape[1:], (0,) * (array.ndim - 1)
    for number, part in enumerate(itertools.pairwise(itertools.accumulate(array.chunks[0], initial=0))):
        key = (array.name, number, *other_axes)
        chunks[holders[key][0]].append(futures[key])
        ranges[holders[key][0]].append(part)
    parts = sorted(chunks)
    token = f"dshuffle-rows-{uuid.uuid4().hex}"
    starts = np.concatenate([[0], np.cumsum(chunk_rows)])
    nbytes = sum(chunk_rows) * array.dtype.itemsize * math.prod(shape)
    n_groups = min(len(chunk_rows), len(workers) * max(1, -(-nbytes // (len(workers) * GROUP_BYTES))))
    cuts = [len(chunk_rows) * group // n_groups for group in range(n_groups + 1)]

    layers: dict[str, MaterializedLayer] = {}
    needs: dict[str, set[str]] = {}

    def add(layer: str, tasks: dict[Any, Any], worker: str = "") -> None:
        needs[layer] = set(layers)
        # If the worker is lost, any other worker may run the tasks.
        pinned = {"workers": [worker], "allow_other_workers": True} if worker else None
        layers[layer] = MaterializedLayer(tasks, annotations=pinned)

    index, columns = f"{token}-index", f"{token}-chunks"
    add(index, {index: (functools.partial(requested, [ranges[worker] for worker in parts]), order)})
    split = functools.partial(split_rows, dtype=array.dtype, starts=starts, cuts=cuts)
    for number, worker in enumerate(parts):
        to, whole = f"{token}-to-{number}", f"{token}-split-{number}"
        add(to, {to: (operator.getitem, index, number)})  # the whole index would go to the part's worker
        pieces = {f"{token}-piece-{number}-{group}": (operator.getitem, whole, group) for group in range(n_groups)}
        add(whole, {whole: (split, to, chunks[worker]), **pieces}, worker)
    results: dict[Any, Any] = {}
    for group, (first, last) in enumerate(itertools.pairwise(cuts)):
        merge = functools.partial(merge_pieces, array.dtype, shape, chunk_rows[first:last])
        whole = f"{token}-merge-{group}"
        names = [f"{token}-piece-{number}-{group}" for number in range(len(parts))]
        add(whole, {whole: (merge, names)}, workers[group * len(workers) // n_groups])
        for chunk in range(first, last):
            results[(columns, chunk, *other_axes)] = (operator.getitem, whole, chunk - first)
    add(columns, results)
    sizes = (tuple(chunk_rows), *((size,) for size in shape))
    made = dask.array.Array(HighLevelGraph(layers, needs), columns, chunks=sizes, dtype=array.dtype)
    # An optimization would fuse tasks of different workers.
    result: dask.array.Array = client.persist(made, optimize_graph=False)
    return result


def permute(client: Client, data: dask.array.Array, seed: int = 0) -> Any:
    """Permute all rows of a Dask array. All orders are equally likely.

    Row k of the result is row ``dshuffle.row_permutation(n_rows, seed)[k]`` of the input. The permutation depends only
    on the seed and the number of rows, not on the chunks or the workers. So arrays of one dataset get the same order.

    Parameters
    ----------
    client
        A synchronous Dask client.
    data
        A Dask array of NumPy chunks, lazy or persisted: its first axis is permuted, and its chunks are merged along all
        other axes.
    seed
        Any integer.

    Returns
    -------
    dask.array.Array
        Array of the same shape and dtype, with the same chunks along the first axis. Its chunks are computed on the
        workers and stay there, as with ``client.persist``.

    Raises
    ------
    InvalidParameter
        If the array does not have an axis, its chunk sizes are unknown, its chunks are not NumPy arrays, or its items
        are objects.
    ClusterError
        If the cluster does not have any workers.

    Notes
    -----
    A lazy array is computed first. The call returns once that is done and the shuffle has started. In addition to the
    input, all workers together need about twice its size, including the result, and 64 MiB of pieces per running task.
    One worker needs another 16 bytes per row for a short time, to draw the permutation. The input is freed on the way
    unless something else holds a reference to it. If a worker is lost, Dask recovers its chunks, provided that the
    input can be computed again.

    Examples
    --------
    >>> import dask.array, dshuffle
    >>> from distributed import Client
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     shuffled = dshuffle.permute(client, dask.array.arange(10, chunks=4), seed=1)
    ...     print(shuffled.chunks, shuffled.compute())
    ((4, 4, 2),) [4 3 0 2 5 9 8 6 7 1]
    >>> dshuffle.row_permutation(10, seed=1)
    array([4, 3, 0, 2, 5, 9, 8, 6, 7, 1])
    """
    check_array(client, data)
    seed = as_integer("seed", seed)
    if data.size == 0:
        return client.persist(data)
    return gather(client, data, data.chunks[0], (row_permutation, len(data), seed))


MOST_ROWS = 2**32
"""Rows of the input and of the output are numbered with 32 bits."""


def take(client: Client, data: dask.array.Array, indices: ArrayLike) -> Any:
    """Take rows of a Dask array by their indices, as :func:`numpy.take` does along the first axis.

    Parameters
    ----------
    client
        A synchronous Dask client.
    data
        A Dask array of NumPy chunks, lazy or persisted; its chunks are merged along all other axes.
    indices
        ``(m,)`` integers, in any order. They may repeat. Negative ones count from the end.

    Returns
    -------
    dask.array.Array
        Array with ``m`` rows, in chunks as large as the largest one of the input. Its chunks are
        computed on the workers and stay there, as with ``client.persist``.

    Raises
    ------
    InvalidParameter
        If the array cannot be permuted either (see :func:`permute`), or an index is not an integer or is out of range.
    ClusterError
        If the cluster does not have any workers.

    Notes
    -----
    A row travels once for each time that it is wanted. All workers together need about the size of the input, and twice
    that of the result. One worker needs another 16 bytes for each row of both for a short time.

    Examples
    --------
    >>> import dask.array, dshuffle
    >>> from distributed import Client
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     taken = dshuffle.take(client, dask.array.arange(10, chunks=4) ** 2, [7, 2, 7, -1])
    ...     taken.compute().tolist()
    [49, 4, 49, 81]
    """
    check_array(client, data)
    chosen = _checked_indices(client, indices, len(data))
    if len(chosen) * data.size == 0:
        return client.persist(dask.array.zeros((len(chosen), *data.shape[1:]), dtype=data.dtype, chunks=-1))
    rows = max(data.chunks[0])
    chunk_rows = tuple(min(rows, len(chosen) - first) for first in range(0, len(chosen), rows))
    [scattered] = client.scatter([chosen], hash=False)
    return gather(client, data, chunk_rows, scattered)


def _checked_indices(client: Client, indices: ArrayLike, n_rows: int) -> NDArray[np.int64]:
    values = client.compute(indices, sync=True) if isinstance(indices, dask.array.Array) else indices
    array = np.asarray(values)
    if array.ndim != 1:
        raise InvalidParameter.of("indices.shape", array.shape, "(m,)", "Ravel them first.")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        hint = "For a mask, take numpy.flatnonzero(mask)." if array.dtype.kind == "b" else ""
        raise InvalidParameter.of("indices.dtype", str(array.dtype), "integers", hint)
    low, high = int(array.min()), int(array.max())
    if low < -n_rows or high >= n_rows:
        worst = low if low < -n_rows else high
        raise InvalidParameter.of("indices", worst, f"in [-{n_rows}, {n_rows})")
    if max(n_rows, array.size) > MOST_ROWS:
        raise InvalidParameter.of("len(indices)", max(n_rows, array.size), f"at most {MOST_ROWS}, as the rows")
    chosen = array.astype(np.int64)
    chosen[chosen < 0] += n_rows
    return chosen
