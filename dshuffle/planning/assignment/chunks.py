"""Assignments of whole chunks to workers.

The numbers of whole chunks per worker differ by at most one. A short chunk at the end of the dataset goes to a worker
that has the fewest chunks. So share sizes differ by at most one chunk's rows. Unequal shares are whole chunks as well,
and the short chunk goes to any worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.slots import Blocks
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import Ranks


@dataclass(frozen=True, slots=True)
class Chunks(Assignment):
    """Every chunk of the store goes to a random worker, which mixes the rows of all its chunks.

    Loaders that read a dataset again in every epoch shuffle this way: no chunk is read by two workers, and the rows of
    a chunk stay together. The first epoch's assignment consists of whole chunks too.

    Parameters
    ----------
    rows
        Number of samples per chunk. None means the chunk size of the dataset, which :class:`~dshuffle.Shuffler` fills
        in. Planning without a dataset needs the number.

    Examples
    --------
    >>> str(Chunks()), str(Chunks(64))
    ('chunks', 'chunks:64')
    """

    name: ClassVar[str] = "chunks"
    forms: ClassVar[str] = "'chunks' or 'chunks:ROWS' (an integer >= 1)"
    forgets: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            object.__setattr__(self, "rows", as_integer("assignment.rows", self.rows, 1))

    def __str__(self) -> str:
        return "chunks" if self.rows is None else f"chunks:{self.rows}"

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        return cls(None if parameter is None else int(parameter))

    def draw(self, draw: Draw) -> EpochDraw:
        return EpochDraw(self.blocks(draw.n_samples, draw.n_workers, draw.seed, draw.epoch, draw.weights).all_ranks())

    def blocks(self, n_samples: int, n_workers: int, seed: int, epoch: int, weights: Weights = ()) -> Blocks:
        return Blocks.drawn(
            n_samples, n_workers, self.unit_for(n_samples, n_workers), "chunks", seed, epoch, weights=weights
        )

    @property
    def unit(self) -> int | None:
        """Rows of a chunk, if known."""
        return self.rows

    def with_unit(self, rows: int) -> Chunks:
        return Chunks(rows)

    def unit_for(self, n_samples: int, n_workers: int) -> int:
        """Return the number of samples per chunk, if it is known and every worker gets a chunk.

        Raises
        ------
        InvalidParameter
            If the number is unknown, or there are fewer chunks than workers.
        """
        if self.rows is None:
            hint = "Planning without a dataset needs the number of samples per chunk."
            raise InvalidParameter.of("assignment", "chunks", "'chunks:ROWS'", hint)
        check_chunks(n_samples, n_workers, self.rows)
        return self.rows


def check_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> None:
    """Check that there are at least as many chunks as workers."""
    n_chunks = -(-n_samples // chunk_rows)
    if n_chunks < n_workers:
        raise InvalidParameter.of(
            "chunk_rows",
            chunk_rows,
            f"at most {(n_samples - 1) // (n_workers - 1)}, for {n_samples} samples and {n_workers} workers",
            f"There {'is only 1 chunk' if n_chunks == 1 else f'are only {n_chunks} chunks'}, and the assignment "
            "'chunks' gives every worker at least one. Create the dataset with smaller chunks, use the assignment "
            "'global', or use fewer workers.",
        )


def slice_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> Ranks:
    """``(n_samples,)`` ranks that give consecutive chunks to each worker, in rank order."""
    return Blocks.contiguous(n_samples, n_workers, chunk_rows).all_ranks()


def deal_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> Ranks:
    """``(n_samples,)`` ranks that give one chunk to each worker in turn."""
    turns = np.arange(-(-n_samples // chunk_rows)) % n_workers
    return np.repeat(turns.astype(np.int32), chunk_rows)[:n_samples]


def draw_chunks(n_samples: int, n_workers: int, chunk_rows: int, *path: int | str) -> Ranks:
    """``(n_samples,)`` ranks that give every chunk to a uniformly random worker, as balanced as chunks allow."""
    return Blocks.drawn(n_samples, n_workers, chunk_rows, *path).all_ranks()
