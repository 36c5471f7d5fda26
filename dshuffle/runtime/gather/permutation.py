"""Permute all rows of a Dask array or dataset once (:func:`permute`), without a session."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import dask.array
from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.runtime.gather.row_gather import Source, checked_array, even_chunks, gather, is_dataset, workers_of
from dshuffle.runtime.gather.row_pieces import ARRAY, destinations

if TYPE_CHECKING:
    from dshuffle.store import Dataset


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
    seed = as_integer("seed", seed)
    if is_dataset(data):
        source = Source.of(client, data)
        chunk_rows = even_chunks(data.n_samples, data.row_nbytes, len(source.workers))
        return gather(client, source, chunk_rows, "permute", functools.partial(destinations, seed))
    array = checked_array(data)
    workers_of(client)
    if array.size == 0:
        return client.persist(array)
    draw = functools.partial(destinations, seed)
    return gather(client, Source.of(client, array), array.chunks[0], "permute", draw)[ARRAY]
