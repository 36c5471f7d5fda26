"""Other samples of a dataset: some of them, windows of rows, and patches of rows."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.stored_array import ArrayInfo, StoredArray
from dshuffle.store.view import Offsets, Patches, View, Windows, split_at_time, split_samples, split_strata

logger = logging.getLogger(__name__)

LIKE_CLASSES = 20
"""Arrays with so few different values may be labels."""

ORDER = "Make windows of the whole dataset first, then patches, and parts of them afterwards."


class Views(ABC):
    """The methods of a dataset that return it with other samples. Nothing is read or copied."""

    __slots__ = ()

    n_samples: int
    arrays: Mapping[str, ArrayInfo]
    _sources: Mapping[str, StoredArray]
    _view: View

    @abstractmethod
    def _seen_as(self, view: View) -> Self:
        """The dataset with other samples of the stored arrays."""

    @property
    @abstractmethod
    def scalars(self) -> list[str]:
        """Names of the arrays with one value for each sample."""

    @abstractmethod
    def read_rows(self, ids: ArrayLike) -> dict[str, NDArray[Any]]:
        """Read samples."""

    @abstractmethod
    def _only(self, name: str) -> Self:
        """The dataset without other arrays than one."""

    @property
    def _widest(self) -> StoredArray:
        """The array with the widest rows, and among equals with the largest chunks."""
        return max(self._sources.values(), key=lambda source: (source.row_nbytes, source.info.chunk_rows))

    def select(self, samples: ArrayLike) -> Self:
        """Return a part of the dataset, as a dataset of its own. Nothing is read or copied.

        Parameters
        ----------
        samples
            ``(q,)`` mask, or distinct ids of samples.
        """
        return self._seen_as(self._view.select(samples))

    def split(
        self, fraction: float, *, by: str = "sample", stratify: str | None = None, seed: int = 0
    ) -> tuple[Self, Self]:
        """Divide the dataset into two parts, for example for training and validation."""
        if stratify is not None and by != "sample":
            raise InvalidParameter.of("stratify", stratify, f"None with by={by!r}", "Leave one of them out.")
        if by == "sample" and (overlapping := self._view.overlapping):
            allowed = f"'chunk', 'time' or the name of an array, because {overlapping} overlap"
            without = "" if stratify is None else f"stratify={stratify!r} needs samples that do not overlap."
            raise InvalidParameter.of("by", by, allowed, without)
        if stratify is not None:
            first, second = split_strata(self._values("stratify", stratify), fraction, seed)
        elif by == "sample":
            first, second = split_samples(self.n_samples, fraction, None, seed)
        elif by == "time":
            first, second = split_at_time(self._times(), fraction)
        elif by == "chunk":
            first, second = split_samples(self.n_samples, fraction, self._chunks(), seed)
        else:
            values = self._values("by", by)
            first, second = split_samples(self.n_samples, fraction, values, seed)
            _say_what_is_held_out(by, values, second)
        apart = self._view.apart(second, first)
        if not apart.any():
            hint = "Keep larger groups together, or use smaller windows."
            raise InvalidParameter.because("by", "every window of the second part overlaps with the first", hint)
        if not apart.all():
            logger.warning(
                "dshuffle: %d of %d samples are in neither part, because they share rows with the first part",
                np.count_nonzero(~apart),
                self.n_samples,
            )
        return self.select(first), self.select(second[apart])

    def _chunks(self) -> NDArray[np.int64]:
        """The chunk of the widest array in which each sample is."""
        rows = self.arrays[self._widest.name].chunk_rows
        chunks = self._view.items(np.arange(self.n_samples)) // rows
        if chunks[0] == chunks[-1]:
            hint = "Split by an array, or write the dataset with fewer samples per chunk."
            raise InvalidParameter.because("by", f"all samples are in one chunk of {rows}", hint)
        return chunks

    def _values(self, parameter: str, name: str) -> NDArray[Any]:
        """An array of one value for each sample, named by a parameter of :meth:`split`."""
        if name not in self.scalars:
            other_choices = "'sample', 'chunk', 'time', or " if parameter == "by" else ""
            raise InvalidParameter.of(parameter, name, f"{other_choices}one of the arrays {', '.join(self.scalars)}")
        return self._only(name).read_rows(np.arange(self.n_samples))[name]

    def _times(self) -> NDArray[Any]:
        """The time of each sample; its place in the stored order if there is no array of times."""
        if "time" not in self.arrays:
            return self._view.items(np.arange(self.n_samples)) // self._view.n_patches
        if "time" not in self.scalars:
            hint = "Give the array one time for each sample, as windows with time=0 do."
            raise InvalidParameter.because("by", f"the samples have times of shape {self.arrays['time'].shape}", hint)
        times = self._values("by", "time")
        if missing := np.count_nonzero(times != times):  # NaN and NaT
            hint = "Select the samples that have one."
            raise InvalidParameter.because("by", f"{missing} of {self.n_samples} samples have no time", hint)
        return times

    def windows(self, offsets: Offsets | Mapping[str, Offsets]) -> Self:
        """Make samples of several consecutive rows, such as steps of time. Nothing is read or copied.

        Parameters
        ----------
        offsets
            Distances of the rows of a sample from its anchor, for all arrays or by name: ``(-1, 0, 1)`` gives an array
            an axis of length 3 in front, and ``1`` gives it the next row in its own shape. Arrays that are not named
            keep the row of the anchor.
        """
        if not self._view.is_whole:
            reason = "this is a part of a dataset, or has windows or patches already"
            raise InvalidParameter.because("offsets", reason, ORDER)
        return self._seen_as(View(self.n_samples, Windows.of(offsets, self.arrays)))

    def patches(self, /, *, stride: int | Mapping[str, int] | None = None, **sizes: int) -> Self:
        """Make samples of boxes of rows, such as regions of a map or tiles of an image. Nothing is read or copied.

        Notes
        -----
        A chunk that spans all dimensions of a row is read once for all its patches. Of other chunks, those that patches
        of the same chunks need are read together, so a chunk that patches share with different neighbours is read more
        than once. Workers hold and exchange whole patches: with a stride below the length, bytes in several patches are
        held several times.
        """
        if self._view.patches is not None or self._view.selection is not None:
            raise InvalidParameter.because("patches", "this is a part of a dataset, or has patches already", ORDER)
        lengths: dict[str, int] = {}
        for source in self._sources.values():
            if repeated := [name for name in sizes if source.dims.count(name) > 1]:
                raise InvalidParameter.because(repeated[0], f"{source.name} has this dimension twice")
            for name, length in zip(source.dims, source.info.shape, strict=True):
                if name is not None and lengths.setdefault(name, length) != length:
                    raise DatasetError(
                        f"dimension {name} has length {lengths[name]} in one array, and {length} in {source.name}"
                    )
        return self._seen_as(View(self._view.n_rows, self._view.windows, Patches.of(sizes, stride, lengths)))


def _say_what_is_held_out(name: str, values: NDArray[Any], second: NDArray[np.int64]) -> None:
    """Say which values the first part lacks, if they are so few that they may be classes."""
    total, held_out = len(np.unique(values)), len(np.unique(values[second]))
    if total <= LIKE_CLASSES:
        logger.warning(
            "dshuffle: %d of %d values of %s are in the second part alone, so nothing is learned of them from the "
            "first. If they are classes, split with stratify=%r",
            held_out,
            total,
            name,
            name,
        )
