"""Rows of a Dask array or dataset by their indices (:func:`take`), without a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dask.array
import numpy as np
from distributed import Client
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.gather.row_gather import Source, checked_array, even_chunks, gather, is_dataset, workers_of
from dshuffle.runtime.gather.row_pieces import ARRAY, requested

if TYPE_CHECKING:
    from dshuffle.store import Dataset

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
        return gather(client, Source.of(client, data), chunk_rows, "take", requested, scattered)
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
    result = gather(client, Source.of(client, array), chunk_rows, "take", requested, scattered)[ARRAY]
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
