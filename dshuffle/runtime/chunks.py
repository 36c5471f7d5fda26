"""How many rows the chunks have that the assignment ``chunks`` deals out."""

from __future__ import annotations

import math

from dshuffle.planning import Assignment, Chunks
from dshuffle.store import Dataset


def with_chunks_of(dataset: Dataset, assignment: Assignment) -> Assignment:
    """The assignment, with the dataset's chunks where it is ``chunks`` and says nothing of their size."""
    return Chunks(unit_rows(dataset)) if assignment == Chunks() else assignment


def unit_rows(dataset: Dataset) -> int:
    """Samples in a chunk of the array with the widest rows; of several such arrays the most.

    It is nearly all of what is read. Other arrays may be in other chunks (a column of labels is often a single one):
    those of their chunks that belong to several workers are read by each, which costs little where rows are narrow.
    Of a sharded array the inner chunks count, since they can be read one by one.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> arrays = {"x": np.zeros((2000, 1024)), "y": np.zeros(2000)}
    >>> dataset = create_dataset("memory://doc-unit-rows", arrays, overwrite=True)
    >>> {name: info.chunk_rows for name, info in dataset.arrays.items()}
    {'x': 512, 'y': 2000}
    >>> unit_rows(dataset)
    512
    """
    widths = ((info.dtype.itemsize * math.prod(info.shape), info.chunk_rows) for info in dataset.arrays.values())
    return max(widths)[1]
