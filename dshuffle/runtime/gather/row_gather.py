"""``dshuffle.permute`` and ``dshuffle.take``: rows that are shuffled or picked, and the plan of their transfers."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import dask.array
import numpy as np
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, futures_of, wait
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.rows import RowLayout
from dshuffle.runtime.client.cluster_view import check_client, cluster_info
from dshuffle.runtime.gather import (
    ARRAY,
    OutputRows,
    Ranges,
    column_of,
    destinations,
    merge_pieces,
    requested,
    split_rows,
)

if TYPE_CHECKING:
    from dshuffle.store import Dataset


GROUP_BYTES = 64 * 2**20
"""Bytes of output that one task merges, or one chunk if that is larger."""
CHUNK_BYTES = 128 * 2**20
"""Maximum bytes in a chunk of a permuted dataset; the same as Dask's default."""


class Part(NamedTuple):
    """Rows of the input that one task splits, on the worker that holds or reads them.

    ``ranges`` are the first and last (exclusive) row of each chunk of the part. ``source`` are the chunks as futures,
    or the dataset to read them from.
    """

    worker: str
    ranges: Ranges
    source: list[Future[Any]] | Dataset


def is_dataset(data: object) -> TypeGuard[Dataset]:
    """Whether data is a dataset. Its module loads Zarr, which a call with a Dask array does without."""
    module = sys.modules.get("dshuffle.store.dataset")  # loaded if there is any dataset
    return module is not None and isinstance(data, module.Dataset)


def workers_of(client: Client) -> list[str]:
    """Addresses of the workers of a synchronous client."""
    check_client(client)
    workers = sorted(cluster_info(client)["workers"])
    if not workers:
        raise ClusterError(
            "the Dask cluster does not have any workers; start some and wait for them with client.wait_for_workers"
        )
    return workers


def checked_array(array: Any) -> dask.array.Array:
    """Check that an array has rows that can be moved."""
    if not isinstance(array, dask.array.Array):
        hint = "Use dask.array.from_array for an array in memory, and dshuffle.open_dataset for a URL."
        reason = f"it is of type {type(array).__name__}, not a dask.array.Array or a dshuffle.Dataset"
        raise InvalidParameter.because("data", reason, hint)
    if array.ndim == 0:
        raise InvalidParameter.of("data.shape", array.shape, "a shape with at least one axis")
    if any(math.isnan(size) for size in itertools.chain.from_iterable(array.chunks)):
        raise InvalidParameter.of("data.chunks", array.chunks, "known sizes", "Call data.compute_chunk_sizes() first.")
    if type(array._meta) is not np.ndarray:
        kind = type(array._meta).__name__
        reason = f"its chunks are of type {kind}, not NumPy arrays"
        raise InvalidParameter.because("data", reason, "Convert them to NumPy arrays first.")
    if array.dtype.hasobject:
        hint = "Cast the array, or encode its items as numbers."
        raise InvalidParameter.of("data.dtype", str(array.dtype), "a dtype of fixed size", hint)
    return array


def even_chunks(n_rows: int, row_nbytes: int, n_workers: int) -> tuple[int, ...]:
    """Chunks of at most :data:`CHUNK_BYTES`, and at least one for each worker."""
    n_chunks = min(n_rows, max(n_workers, -(-n_rows * row_nbytes // CHUNK_BYTES)))
    return tuple(np.diff([n_rows * k // n_chunks for k in range(n_chunks + 1)]).tolist())


def _parts_of(client: Client, data: Any, workers: list[str]) -> tuple[RowLayout, list[Part]]:
    """The input on the workers. A lazy array is computed, and its chunks are merged along other axes."""
    if is_dataset(data):
        unit_rows = importlib.import_module("dshuffle.runtime.dataset_inputs").unit_rows
        rows = unit_rows(data)  # whole chunks, so that no chunk of the widest array is read twice
        n_chunks = -(-data.n_samples // rows)
        bounds = [min(data.n_samples, n_chunks * k // len(workers) * rows) for k in range(len(workers) + 1)]
        places = zip(workers, itertools.pairwise(bounds), strict=True)
        return data.layout, [Part(worker, [part], data) for worker, part in places if part[0] < part[1]]
    array = client.persist(data.rechunk({axis: -1 for axis in range(1, data.ndim)}))
    futures = {future.key: future for future in futures_of(array)}
    wait(list(futures.values()))
    for future in futures.values():
        if future.status == "error":
            future.result()
    holders = client.who_has(list(futures.values()))
    chunks: dict[str, list[Future[Any]]] = defaultdict(list)
    ranges: dict[str, Ranges] = defaultdict(list)
    for number, part in enumerate(itertools.pairwise(itertools.accumulate(array.chunks[0], initial=0))):
        key = (array.name, number, *(0 for _ in array.shape[1:]))
        worker = holders[key][0]
        chunks[worker].append(futures[key])
        ranges[worker].append(part)
    layout = RowLayout.of({ARRAY: (array.dtype, array.shape[1:])})
    return layout, [Part(worker, ranges[worker], chunks[worker]) for worker in sorted(chunks)]


def gather(
    client: Client,
    data: dask.array.Array | Dataset,
    chunk_rows: Sequence[int],
    name: str,
    draw: Callable[..., list[OutputRows]],
    *arguments: Any,
) -> dict[str, dask.array.Array]:
    """Start the tasks, each on the worker that holds its input or output."""
    workers = workers_of(client)
    layout, parts = _parts_of(client, data, workers)
    token = f"dshuffle-{name}-{uuid.uuid4().hex}"
    index, n_rows, starts = f"{token}-index", sum(chunk_rows), np.concatenate([[0], np.cumsum(chunk_rows)])
    per_worker = -(-n_rows * layout.nbytes // (len(workers) * GROUP_BYTES))
    n_groups = min(len(chunk_rows), len(workers) * max(1, per_worker))
    cuts = [len(chunk_rows) * group // n_groups for group in range(n_groups + 1)]

    layers: dict[str, MaterializedLayer] = {}
    needs: dict[str, set[str]] = {}

    def add(layer: str, tasks: dict[Any, Any], worker: str = "") -> None:
        needs[layer] = set(layers)
        # If the worker is lost, any other worker may run the tasks.
        pinned = {"workers": [worker], "allow_other_workers": True} if worker else None
        layers[layer] = MaterializedLayer(tasks, annotations=pinned)

    add(index, {index: (functools.partial(draw, [part.ranges for part in parts]), *arguments)})
    for number, part in enumerate(parts):
        split = functools.partial(split_rows, ranges=part.ranges, layout=layout, starts=starts, cuts=cuts)
        to, whole = f"{token}-to-{number}", f"{token}-split-{number}"
        add(to, {to: (operator.getitem, index, number)})  # the whole index would go to the part's worker
        pieces = {f"{token}-piece-{number}-{group}": (operator.getitem, whole, group) for group in range(n_groups)}
        add(whole, {whole: (split, to, part.source), **pieces}, part.worker)
    results: dict[str, dict[Any, Any]] = {name: {} for name in layout.names}
    for group, (first, last) in enumerate(itertools.pairwise(cuts)):
        merge = functools.partial(merge_pieces, layout, chunk_rows[first:last])
        whole = f"{token}-merge-{group}"
        names = [f"{token}-piece-{number}-{group}" for number in range(len(parts))]
        add(whole, {whole: (merge, names)}, workers[group * len(workers) // n_groups])
        for (name, _, shape), chunk in itertools.product(layout.fields, range(first, last)):
            column = functools.partial(column_of, layout, name, chunk - first)
            results[name][(f"{token}-column-{name}", chunk, *(0 for _ in shape))] = (column, whole)
    for name, tasks in results.items():
        add(f"{token}-column-{name}", tasks)
    graph = HighLevelGraph(layers, needs)
    arrays = [
        dask.array.Array(
            graph,
            f"{token}-column-{name}",
            chunks=(tuple(chunk_rows), *((size,) for size in shape)),
            dtype=layout.dtype[name].base if (encoding := layout.encoding(name)) is None else np.dtype(encoding.dtype),
        )
        for name, _, shape in layout.fields
    ]
    # Graph optimization would fuse tasks of different workers.
    made = client.persist(arrays, optimize_graph=False)
    if is_dataset(data) and data.is_temporary:
        for future in futures_of(made):  # the dataset must last until it has been read
            future.add_done_callback(lambda _, kept=data: None)
    return dict(zip(layout.names, made, strict=True))


def permute(client: Client, data: dask.array.Array | Dataset, seed: int = 0) -> Any:
    """Permute all rows of a Dask array or dataset. All orders are equally likely.

    Row k of the result is row ``dshuffle.row_permutation(n_rows, seed)[k]`` of the input. The permutation depends only
    on the seed and the number of rows, not on the chunks or the workers.

    Parameters
    ----------
    client
        A synchronous Dask client.
    data
        A Dask array of NumPy chunks, lazy or persisted: its first axis is permuted, and its chunks are merged along all
        other axes. Or a :class:`Dataset`: all of its arrays are permuted in the same way, and decoded.
    seed
        Any integer.

    Returns
    -------
    dask.array.Array or dict
        Array of the same shape and dtype, with the same chunks along the first axis. Its chunks are computed on the
        workers and stay there, as with ``client.persist``. For a dataset, a dict of name -> array, in chunks of at most
        128 MiB of samples and at least one chunk per worker.

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
    draw = functools.partial(destinations, as_integer("seed", seed))
    if is_dataset(data):
        chunk_rows = even_chunks(data.n_samples, data.row_nbytes, len(workers_of(client)))
        return gather(client, data, chunk_rows, "permute", draw)
    array = checked_array(data)
    workers_of(client)
    if array.size == 0:
        return client.persist(array)
    return gather(client, array, array.chunks[0], "permute", draw)[ARRAY]


MOST_ROWS = 2**32
"""Rows of the input and of the output are numbered with 32 bits."""


def take(client: Client, data: dask.array.Array | Dataset, indices: ArrayLike, axis: int = 0) -> Any:
    """Take rows of a Dask array or dataset by their indices, as :func:`numpy.take` does.

    Parameters
    ----------
    client
        A synchronous Dask client.
    data
        A Dask array of NumPy chunks, lazy or persisted; its chunks are merged along all other axes. Or a
        :class:`Dataset`: the same samples of all of its arrays are taken, and decoded.
    indices
        ``(m,)`` integers, in any order. They may repeat. Negative ones count from the end.
    axis
        Axis of a Dask array. A dataset has only axis 0.

    Returns
    -------
    dask.array.Array or dict
        Array with ``m`` rows along the axis, in chunks as large as the largest one of the input. Its chunks are
        computed on the workers and stay there, as with ``client.persist``. For a dataset, a dict of name -> array, in
        chunks of at most 128 MiB of samples and at least one chunk per worker.

    Raises
    ------
    InvalidParameter
        If the array cannot be permuted either (see :func:`permute`), it does not have the axis, or an index is not an
        integer or is out of range.
    ClusterError
        If the cluster does not have any workers.

    Notes
    -----
    A row travels once for each time that it is wanted. All workers together need about the size of the input, and twice
    that of the result. One worker needs another 16 bytes for each row of both for a short time. Only the chunks of a
    dataset that hold wanted samples are read.

    Examples
    --------
    >>> import dask.array, dshuffle
    >>> from distributed import Client
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     taken = dshuffle.take(client, dask.array.arange(10, chunks=4) ** 2, [7, 2, 7, -1])
    ...     taken.compute().tolist()
    [49, 4, 49, 81]
    """
    workers = workers_of(client)
    if is_dataset(data):
        if axis != 0:
            raise InvalidParameter.of("axis", axis, "0 for a dataset")
        chosen = _checked_indices(client, indices, data.n_samples)
        if not len(chosen):
            raise InvalidParameter.of("indices", indices, "at least one index of a dataset")
        chunk_rows = even_chunks(len(chosen), data.row_nbytes, len(workers))
        [scattered] = client.scatter([chosen], hash=False)
        return gather(client, data, chunk_rows, "take", requested, scattered)
    array = checked_array(data)
    axis = as_integer("axis", axis)
    if not -array.ndim <= axis < array.ndim:
        raise InvalidParameter.of("axis", axis, f"an axis of an array with {array.ndim} axes")
    array = dask.array.moveaxis(array, axis, 0)
    chosen = _checked_indices(client, indices, len(array))
    if len(chosen) * array.size == 0:
        result = dask.array.zeros((len(chosen), *array.shape[1:]), dtype=array.dtype, chunks=-1)
        return client.persist(dask.array.moveaxis(result, 0, axis))
    rows = max(array.chunks[0])
    chunk_rows = tuple(min(rows, len(chosen) - first) for first in range(0, len(chosen), rows))
    [scattered] = client.scatter([chosen], hash=False)
    result = gather(client, array, chunk_rows, "take", requested, scattered)[ARRAY]
    return result if axis == 0 else client.persist(dask.array.moveaxis(result, 0, axis))


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
