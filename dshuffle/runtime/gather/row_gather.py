"""Rows of a Dask array or dataset in any order, moved between workers without a session: for ``permute`` and ``take``.

On each worker one task splits the rows and packs them into one buffer per group of output chunks. One task per group
merges the buffers. The number of transfers is workers times groups, independent of the number of chunks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import dask.array
import numpy as np
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, futures_of, wait

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.rows import RowLayout
from dshuffle.runtime.client.cluster_view import check_client, cluster_info
from dshuffle.runtime.gather.row_pieces import ARRAY, OutputRows, Ranges, column_of, merge_pieces, split_rows

if TYPE_CHECKING:
    from dshuffle.store import Dataset

GROUP_BYTES = 64 * 2**20
"""Bytes of output that one task merges, or one chunk if that is larger."""
CHUNK_BYTES = 128 * 2**20
"""Maximum bytes in a chunk of a permuted dataset; the same as Dask's default."""

Key = Any


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of the input that one task splits.

    Parameters
    ----------
    worker
        Address of the worker that holds or reads the rows.
    ranges
        First and last (exclusive) row of each chunk of the part.
    source
        The chunks as futures, or the dataset to read them from.
    """

    worker: str
    ranges: Ranges
    source: list[Future[Any]] | Dataset


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The input: a Dask array whose chunks are on the workers, or a dataset.

    Parameters
    ----------
    layout
        Layout of a row.
    parts
        Its rows, one part for each worker that holds or reads some.
    workers
        Addresses of all workers.
    """

    layout: RowLayout
    parts: Sequence[Part]
    workers: Sequence[str]

    @classmethod
    def of(cls, client: Client, data: dask.array.Array | Dataset) -> Source:
        """The input on the workers of a cluster; a lazy array is computed, and its chunks merged along other axes."""
        workers = workers_of(client)
        if not isinstance(data, dask.array.Array):
            return cls(data.layout, _parts_of_dataset(data, workers), workers)
        array = client.persist(data.rechunk({axis: -1 for axis in range(1, data.ndim)}))
        layout = RowLayout.of({ARRAY: (array.dtype, array.shape[1:])})
        return cls(layout, _parts_of_array(client, array), workers)


def is_dataset(data: object) -> TypeGuard[Dataset]:
    """Whether data is a dataset. Its module loads Zarr, which a call with a Dask array does without."""
    module = sys.modules.get("dshuffle.store.dataset")  # loaded if there is any dataset
    return module is not None and isinstance(data, module.Dataset)


def workers_of(client: Client) -> list[str]:
    """Addresses of the workers of a synchronous client.

    Raises
    ------
    ClusterError
        If there are none.
    """
    check_client(client)
    workers = sorted(cluster_info(client)["workers"])
    if not workers:
        raise ClusterError(
            "the Dask cluster does not have any workers; start some and wait for them with client.wait_for_workers"
        )
    return workers


def checked_array(array: Any) -> dask.array.Array:
    """Check that an array has rows that can be moved.

    Raises
    ------
    InvalidParameter
        If it does not.
    """
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


def _parts_of_dataset(dataset: Dataset, workers: list[str]) -> list[Part]:
    unit_rows = importlib.import_module("dshuffle.runtime.dataset_inputs").unit_rows
    rows = unit_rows(dataset)  # whole chunks, so that no chunk of the widest array is read twice
    n_chunks = -(-dataset.n_samples // rows)
    bounds = [min(dataset.n_samples, n_chunks * k // len(workers) * rows) for k in range(len(workers) + 1)]
    return [
        Part(worker, [(first, last)], dataset)
        for worker, (first, last) in zip(workers, itertools.pairwise(bounds), strict=True)
        if first < last
    ]


def _parts_of_array(client: Client, array: dask.array.Array) -> list[Part]:
    futures = {future.key: future for future in futures_of(array)}
    wait(list(futures.values()))
    for future in futures.values():
        if future.status == "error":
            future.result()
    places = client.who_has(list(futures.values()))
    chunks: dict[str, list[Future[Any]]] = defaultdict(list)
    ranges: dict[str, Ranges] = defaultdict(list)
    bounds = itertools.pairwise(itertools.accumulate(array.chunks[0], initial=0))
    for number, (first, last) in enumerate(bounds):
        key = (array.name, number, *(0 for _ in array.shape[1:]))
        # If several workers have the chunk, take the one with the fewest chunks so far.
        worker = min(places[key], key=lambda address: len(chunks[address]))
        chunks[worker].append(futures[key])
        ranges[worker].append((first, last))
    return [Part(worker, ranges[worker], chunks[worker]) for worker in sorted(chunks)]


def gather(
    client: Client,
    source: Source,
    chunk_rows: Sequence[int],
    name: str,
    draw: Callable[..., list[OutputRows]],
    *arguments: Any,
) -> dict[str, dask.array.Array]:
    """Start the tasks, each on the worker that holds its input or output.

    Parameters
    ----------
    chunk_rows
        Rows of each chunk of the output.
    name
        What the tasks are called.
    draw
        Called as ``draw(ranges, *arguments)`` on a worker, with the ranges of each part. It returns what the output has
        of each part.
    *arguments
        May be futures.

    Returns
    -------
    dict
        Name -> array of the output.
    """
    layout, parts, workers = source.layout, source.parts, source.workers
    token = f"dshuffle-{name}-{uuid.uuid4().hex}"
    index, columns = f"{token}-index", {name: f"{token}-column-{name}" for name in layout.names}
    n_rows, starts = sum(chunk_rows), np.concatenate([[0], np.cumsum(chunk_rows)])
    per_worker = -(-n_rows * layout.nbytes // (len(workers) * GROUP_BYTES))
    n_groups = min(len(chunk_rows), len(workers) * max(1, per_worker))
    cuts = [len(chunk_rows) * group // n_groups for group in range(n_groups + 1)]

    drawing = functools.partial(draw, [part.ranges for part in parts])
    layers: dict[str, Mapping[Key, Any]] = {index: {index: (drawing, *arguments)}}
    needs: dict[str, set[str]] = {index: set()}
    for number, part in enumerate(parts):
        split = functools.partial(split_rows, ranges=part.ranges, layout=layout, starts=starts, cuts=cuts)
        to, whole = f"{token}-to-{number}", f"{token}-split-{number}"
        # Not on the part's worker: the whole index would go there.
        layers[to], needs[to] = {to: (operator.getitem, index, number)}, {index}
        tasks: dict[Key, Any] = {whole: (split, to, part.source)}
        for group in range(n_groups):
            tasks[f"{token}-piece-{number}-{group}"] = (operator.getitem, whole, group)
        layers[whole] = _pinned(tasks, part.worker)
        needs[whole] = {to}
    results: dict[str, dict[Key, Any]] = {name: {} for name in layout.names}
    for group, (first, last) in enumerate(itertools.pairwise(cuts)):
        merge = functools.partial(merge_pieces, layout, chunk_rows[first:last])
        whole = f"{token}-merge-{group}"
        pieces = [f"{token}-piece-{number}-{group}" for number in range(len(parts))]
        layers[whole] = _pinned({whole: (merge, pieces)}, workers[group * len(workers) // n_groups])
        needs[whole] = set(layers) - {whole}
        for (name, _, shape), chunk in itertools.product(layout.fields, range(first, last)):
            column = functools.partial(column_of, layout, name, chunk - first)
            results[name][(columns[name], chunk, *(0 for _ in shape))] = (column, whole)
    merges = set(layers)
    for name, tasks in results.items():
        layers[columns[name]] = tasks
        needs[columns[name]] = merges
    graph = HighLevelGraph(layers, needs)
    arrays = [
        dask.array.Array(
            graph,
            columns[name],
            chunks=(tuple(chunk_rows), *((size,) for size in shape)),
            dtype=layout.dtype[name].base if (encoding := layout.encoding(name)) is None else np.dtype(encoding.dtype),
        )
        for name, _, shape in layout.fields
    ]
    # Graph optimization would fuse tasks of different workers.
    made = client.persist(arrays, optimize_graph=False)
    read = [part.source for part in parts if not isinstance(part.source, list) and part.source.is_temporary]
    if read:
        for future in futures_of(made):  # the dataset must last until it has been read
            future.add_done_callback(lambda _, kept=read: None)
    return dict(zip(layout.names, made, strict=True))


def _pinned(tasks: dict[Key, Any], worker: str) -> MaterializedLayer:
    # If the worker is lost, any other worker may run the tasks.
    return MaterializedLayer(tasks, annotations={"workers": [worker], "allow_other_workers": True})
