"""Shardings: the first assignment, drawn from the seed or given."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_ranks, as_shape
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning.assignment.rules import check_chunks
from dshuffle.planning.assignment.slots import Blocks
from dshuffle.planning.types import Ranks, Samples

SHARDINGS = ("contiguous", "random", "round-robin")
"""Shardings that are drawn from the seed."""


def first_ranks(sharding: str, n_samples: int, n_workers: int, *, seed: int, chunk_rows: int = 1) -> Ranks:
    """Make the assignment of epoch 0, which gives out whole chunks, or single samples."""
    n_samples, n_workers = as_shape(n_samples, n_workers)
    if sharding not in SHARDINGS:
        raise InvalidParameter.of("sharding", sharding, f"one of {sorted(SHARDINGS)}")
    check_chunks(n_samples, n_workers, as_integer("chunk_rows", chunk_rows, 1))
    if sharding == "contiguous":
        return Blocks.contiguous(n_samples, n_workers, chunk_rows).all_ranks()
    if sharding == "random":
        return Blocks.drawn(n_samples, n_workers, chunk_rows, "sharding", seed).all_ranks()
    turns = np.arange(-(-n_samples // chunk_rows)) % n_workers
    return np.repeat(turns.astype(np.int32), chunk_rows)[:n_samples]


@dataclass(frozen=True, slots=True, eq=False)
class GivenSharding:
    """A first assignment that is not drawn from the seed alone, with ranks or known by name only."""

    name: str  # Name in records, and of the stored ranks in the dataset.
    # n_workers, checksum: Number of workers and checksum of the ranks. None accepts ranks for any number of workers.
    n_workers: int | None = None
    checksum: int | None = None
    # ``(q,)`` int32, or None while only the name is known, since each member of a session reads the ranks itself.
    ranks: Ranks | None = None
    # Ascending int64 samples that every worker trains on and holds permanently, whatever their ranks say. None while
    # only the name is known.
    broadcast: Samples | None = None
    n_broadcast: int = 0

    @classmethod
    def of(cls, name: str, ranks: ArrayLike, broadcast: ArrayLike = ()) -> Self:
        """Check ranks and broadcast samples, and make a sharding of them."""
        checked = as_ranks("sharding", ranks, 1 << 31)
        n_workers = int(checked.max()) + 1 if checked.size else 0
        as_integer("len(sharding)", checked.size, max(1, n_workers), "Every worker must get a sample.")
        everywhere = _as_broadcast(broadcast, checked.size)
        hint = "Every worker must get a sample of its own besides the broadcast samples."
        as_integer("samples that are not broadcast", checked.size - len(everywhere), n_workers, hint)
        sizes = np.bincount(np.delete(checked, everywhere) if len(everywhere) else checked, minlength=n_workers)
        if sizes.max() - sizes.min() > 1:
            raise InvalidParameter.because(
                "sharding",
                f"worker {int(sizes.argmin())} has {sizes.min()} samples and worker {int(sizes.argmax())} has "
                f"{sizes.max()}" + (", not counting the broadcast samples" if len(everywhere) else ""),
                "Share sizes must differ by at most one, because workers with smaller shares would wait for the others "
                "in every epoch.",
            )
        return cls(name, n_workers, _checksum(checked, everywhere), checked, everywhere, len(everywhere))

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenSharding) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, int | None, int | None]:
        return self.name, self.n_workers, self.checksum

    def by_name(self) -> GivenSharding:
        """Return a copy without arrays, which is small to send."""
        return dataclasses.replace(self, ranks=None, broadcast=None)

    def found(self, ranks: ArrayLike, broadcast: ArrayLike = ()) -> GivenSharding:
        """Return a copy with ranks and broadcast samples."""
        sharding = GivenSharding.of(self.name, ranks, broadcast)
        for name, expected in (("n_workers", self.n_workers), ("checksum", self.checksum)):
            if expected is not None and expected != getattr(sharding, name):
                raise InvalidParameter.of(
                    f"sharding {self.name!r}: {name}",
                    getattr(sharding, name),
                    f"{expected}, as when the session was opened",
                    "The sharding may have been rewritten. Create a new Shuffler.",
                )
        return sharding

    def check(self, n_samples: int, n_workers: int) -> None:
        """Check that the sharding fits a job."""
        if self.n_workers is not None and self.n_workers != n_workers:
            raise InvalidParameter.of(
                "n_workers",
                n_workers,
                f"{self.n_workers}, for which the sharding {self.name!r} was made",
                f"Make a sharding for {n_workers} workers.",
            )
        if self.ranks is not None and len(self.ranks) != n_samples:
            raise InvalidParameter.of(
                f"len(sharding {self.name!r})", len(self.ranks), f"{n_samples}, one rank per sample"
            )

    def assignment(self) -> Ranks:
        """Return a copy of the ranks, ``(q,)`` int32."""
        if self.ranks is None:
            raise PlanError(f"the ranks of the sharding {self.name!r} are not known here")
        return self.ranks.copy()

    def others(self) -> Samples:
        """Samples that are not broadcast, ascending int64."""
        everywhere = np.empty(0, dtype=np.int64) if self.broadcast is None else self.broadcast
        return np.delete(np.arange(len(self.assignment())), everywhere)

    def of_others(self) -> GivenSharding:
        """Return the sharding of the samples that are not broadcast, renumbered from 0."""
        return GivenSharding.of(self.name, self.assignment()[self.others()])


def _checksum(ranks: Ranks, broadcast: Samples) -> int:
    checksum = zlib.crc32(np.ascontiguousarray(ranks, dtype="<i4").data)
    return zlib.crc32(np.ascontiguousarray(broadcast, dtype="<i8").data, checksum)


def _as_broadcast(broadcast: ArrayLike, n_samples: int) -> Samples:
    samples = np.asarray(broadcast)
    if samples.ndim != 1 or (samples.size and samples.dtype.kind not in "iu"):
        raise InvalidParameter.because(
            "broadcast",
            f"it has dtype {samples.dtype} and shape {samples.shape}",
            "Pass a one-dimensional array of integers.",
        )
    samples = samples.astype(np.int64)
    if samples.size and not (samples[0] >= 0 and samples[-1] < n_samples and np.all(np.diff(samples) > 0)):
        raise InvalidParameter.of("broadcast", samples, f"ascending samples in [0, {n_samples}), each once")
    return samples
