"""Split a worker's samples into batches so that every worker has the same number of batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.types import Samples

DROP, PAD, UNEVEN = "drop", "pad", "uneven"
MODES = (DROP, PAD, UNEVEN)


@dataclass(frozen=True, slots=True)
class Batching:
    """The batches of one worker in an epoch; every worker has the same number."""

    # Equal shares differ in size by one sample, or with ``chunks`` by up to one chunk. Synchronous training hangs if
    # one worker has an extra batch. With unequal shares only ``"uneven"`` has batches of all samples, in proportion to
    # the shares. There are fewer and larger batches if the smallest share has too few samples, because measured shares
    # change while a model is trained.

    n_own: int  # Number of samples of this worker.
    # smallest, largest: Numbers of samples of the smallest and the largest share; the same on every worker.
    smallest: int
    largest: int
    # Number of samples per batch, at most ``smallest``. With unequal shares, the largest number in a batch of the
    # largest share, unless the smallest share would have fewer than ``least`` in a batch; and at most ``largest``.
    batch_size: int
    # ``"drop"``: ``smallest // batch_size`` full batches; the remaining samples are skipped. ``"pad"``: ``ceil(largest
    # / batch_size)`` full batches; the last ones are filled up with the first samples, which are trained on twice.
    # ``"uneven"``: ``ceil(largest / batch_size)`` batches that contain every sample once. Their sizes are at most
    # ``batch_size`` and differ by at most one.
    mode: str
    # Whether shares are or may become unequal on purpose (:class:`~dshuffle.planning.Choices`, ``shares``).
    unequal: bool = False
    least: int = 1  # With unequal shares, the smallest number of samples in a batch.

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidParameter.of("mode", self.mode, f"one of {list(MODES)}")
        size = as_integer("batch_size", self.batch_size, 1)
        if self.unequal and self.mode != UNEVEN:
            now = f"{self.smallest} to {self.largest} samples now"
            hint = f"Batches are in proportion to shares. These have {now}, and measured shares change."
            raise InvalidParameter.of("mode", self.mode, f"{UNEVEN!r} with unequal shares", hint)
        most, which = (self.largest, "largest") if self.unequal else (self.smallest, "smallest")
        if size > most:
            hint = f"A batch cannot be larger than the {which} share. Use smaller batches or fewer workers."
            raise InvalidParameter.of("batch_size", size, f"in [1, {most}]", hint)
        if self.unequal and self.smallest < self.least:
            reason = f"the smallest share has {self.smallest} samples, and a batch needs {self.least}"
            raise InvalidParameter.because("shares", reason, "Use more equal shares or fewer workers.")
        if self.mode == UNEVEN and len(self) > self.smallest:
            allowed = f"at least {-(-self.largest // self.smallest)} with mode='uneven'"
            hint = f"Workers have {self.smallest} to {self.largest} samples, and no batch may be empty."
            raise InvalidParameter.of("batch_size", size, allowed, hint)

    def __len__(self) -> int:
        if self.mode == DROP:
            return self.smallest // self.batch_size
        n_batches = -(-self.largest // self.batch_size)
        return min(n_batches, self.smallest // self.least) if self.unequal else n_batches

    def positions(self, batch: int) -> Samples:
        """``(size,)`` int64 positions of a batch's samples within the worker's order."""
        if self.mode == UNEVEN:
            return np.arange(self.n_own * batch // len(self), self.n_own * (batch + 1) // len(self))
        return np.arange(batch * self.batch_size, (batch + 1) * self.batch_size) % self.n_own

    def n_samples(self, n_batches: int) -> int:
        """Number of samples in the first batches, from the first one in training order."""
        if self.mode == UNEVEN:
            return self.n_own * n_batches // len(self)
        return min(n_batches * self.batch_size, self.n_own)
