"""A dataset: arrays of a Zarr group that share a dimension of samples."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_indices, as_integer
from dshuffle.errors import DatasetChanged, DatasetError, InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.store import reader
from dshuffle.store.cf import Decoding
from dshuffle.store.identity import Opening, ends_of
from dshuffle.store.patient_store import Meter, PatientStore
from dshuffle.store.scatter import Sink
from dshuffle.store.stored_array import ArrayInfo, StoredArray
from dshuffle.store.view import View
from dshuffle.store.views import Views
from dshuffle.units import human_bytes, human_count


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dataset(Views):
    """Arrays in a store that share a dimension of samples, from :func:`open_dataset` or :func:`create_dataset`.

    A dataset may be used from several threads at once. Its pickle holds the URL and the storage options, and
    unpickling opens the dataset again.

    Parameters
    ----------
    url
        URL of the dataset; local paths are absolute.
    n_samples
        Length of this dimension.
    arrays
        Name -> dtype, shape of one sample, samples in a chunk.
    skipped
        Name -> why an array of the group is not part of the dataset.
    undecoded
        Name -> why the values of an array are numbers, although its attributes speak of times.
    layout
        Position of each array in a row.
    """

    url: str
    n_samples: int
    arrays: Mapping[str, ArrayInfo]
    skipped: Mapping[str, str]
    undecoded: Mapping[str, str]
    layout: RowLayout
    _stored_identity: str
    _store: PatientStore
    _sources: Mapping[str, StoredArray]
    _meter: Meter
    _opening: Opening
    _open: Callable[[Opening, Decoding], Dataset]
    _view: View
    _folder: object | None = None  # a temporary folder lasts as long as the datasets in it

    @property
    def identity(self) -> str:
        """A name for this content: copies have the same one, and a dataset that was written again has another one.

        It is stored with datasets from :func:`create_dataset`. For any other group it is a digest of its metadata, and
        of the last bytes of a few chunks. A part of a dataset has an identity of its own.
        """
        return self._view.identity(self._stored_identity)

    @property
    def is_view(self) -> bool:
        """Whether its samples differ from those of the stored dataset: a part of them, windows, or patches."""
        return not self._view.is_whole

    @property
    def scalars(self) -> list[str]:
        """Names of the arrays with one value for each sample."""
        return [name for name, info in self.arrays.items() if not info.shape]

    @property
    def is_temporary(self) -> bool:
        """Whether it is in a temporary folder that lasts as long as this object, or another one of the same dataset."""
        return self._folder is not None

    @property
    def row_nbytes(self) -> int:
        """Bytes of one sample, summed over all arrays."""
        return self.layout.nbytes

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options of the store, with which it was opened. They may hold secrets."""
        return self._opening.location.storage_options

    @property
    def traffic(self) -> StoreTraffic:
        """Traffic of this object so far; subtract two values for the traffic between them."""
        return self._meter.traffic

    def read_rows(self, ids: ArrayLike, *, memory_budget: int = reader.MEMORY_BUDGET) -> dict[str, NDArray[Any]]:
        """Read samples; each chunk that holds any of them is read once.

        Parameters
        ----------
        ids
            ``(n,)`` integers in ``[0, n_samples)``, in any order; they may repeat.
        memory_budget
            Bytes of chunks in flight at a time. A larger chunk is read alone.

        Returns
        -------
        dict
            Name -> array of shape ``(n, *shape of one sample)``.

        Raises
        ------
        InvalidParameter
            If an id is out of range.
        CorruptChunk
            If a chunk is missing, truncated or fails its checksum.
        DatasetError
            If a date or duration is beyond what its dtype can hold.

        Examples
        --------
        >>> from dshuffle.store import create_dataset
        >>> dataset = create_dataset("memory://doc-read", {"x": np.arange(10) ** 2}, overwrite=True)
        >>> dataset.read_rows([7, 2, 7])
        {'x': array([49,  4, 49])}
        """
        samples = as_indices("ids", ids, self.n_samples, "samples")
        rows, sinks = {}, []
        for name, source in self._sources.items():
            n_items = math.prod(self.arrays[name].shape)
            rows[name] = np.empty((samples.size, n_items * source.dtype.itemsize), np.uint8)
            if rows[name].size:
                sinks.append(self._sink(source, rows[name], 0))
        self._read(sinks, samples, np.arange(samples.size), memory_budget)
        return {name: self._sources[name].values(matrix, self.arrays[name].shape) for name, matrix in rows.items()}

    def read_into(
        self,
        rows: ByteMatrix,
        slots: ArrayLike,
        ids: ArrayLike,
        *,
        memory_budget: int = reader.MEMORY_BUDGET,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Read samples ``ids`` into ``rows[slots]`` of a packed byte matrix; each chunk is read once.

        Memory use beyond ``rows`` stays within the budget. After an error some of ``rows[slots]`` may have been
        written, but nothing writes to them once this method has raised.

        Parameters
        ----------
        rows
            ``(capacity, row_nbytes)`` uint8, contiguous: see :class:`~dshuffle.rows.RowLayout`.
        slots
            ``(n,)`` distinct integers in ``[0, capacity)``.
        ids
            ``(n,)`` integers in ``[0, n_samples)``.
        memory_budget
            Bytes of chunks in flight at a time. A larger chunk is read alone.
        stop
            Called before each read; reading ends once it returns true.

        Raises
        ------
        DatasetError
            If ``stop`` returned true.
        InvalidParameter
            If the matrix does not fit the layout, or a slot or an id does not exist.
        CorruptChunk
            If a chunk is missing, truncated or fails its checksum.
        """
        samples = as_indices("ids", ids, self.n_samples, "samples")
        places = _checked_slots(rows, slots, samples.size, self.row_nbytes)
        fields = self.layout.dtype.fields
        assert fields is not None
        sinks = [self._sink(source, rows, fields[name][1]) for name, source in self._sources.items()]
        self._read(sinks, samples, places, memory_budget, stop)

    def slabs(self, nbytes: int) -> Iterator[NDArray[np.int64]]:
        """All samples in ascending order, in pieces for :meth:`read_rows` that divide few chunks.

        Parameters
        ----------
        nbytes
            Bytes of the rows of a slab. A slab has at least the samples of one chunk of the largest array.

        Yields
        ------
        ndarray
            Ids of samples. Slabs begin where chunks of the largest array begin (anchors of windows do). If several
            chunks of another array fit, they begin where its chunks begin.

        Examples
        --------
        >>> from dshuffle.store import create_dataset
        >>> dataset = create_dataset("memory://doc-slabs", {"x": np.arange(10)}, chunk_rows=3, overwrite=True)
        >>> [ids.tolist() for ids in dataset.slabs(60)]
        [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
        """
        most = nbytes // max(1, self.row_nbytes)
        unit = self.arrays[self._widest.name].chunk_rows
        unit = max([unit, *(info.chunk_rows for info in self.arrays.values() if info.chunk_rows <= most)])
        step = max(1, most // unit) * unit
        for begin in range(0, self._view.n_items, step):
            if len(ids := self._view.within(begin, begin + step)):
                yield ids

    def ends(self) -> str:
        """Digest of the last bytes of a few chunks, for a comparison with what other processes see."""
        return ends_of(self._store.bare, (source.array for source in self._sources.values()))

    def close(self) -> None:
        """Close the files and connections of the store. They are opened again if more is read."""
        self._store.close()

    def _only(self, name: str) -> Dataset:
        return dataclasses.replace(self, _sources={name: self._sources[name]})

    def _seen_as(self, view: View) -> Dataset:
        infos = {name: view.info(name, source) for name, source in self._sources.items()}
        items = {name: (source.dtype, infos[name].shape) for name, source in self._sources.items()}
        return dataclasses.replace(
            self,
            n_samples=view.n_samples,
            arrays=MappingProxyType(infos),
            layout=RowLayout.of(items, dict(self.layout.encodings)),
            _view=view,
        )

    def check_unchanged(self) -> None:
        """Check that the dataset is still the one that was opened. Call it after a read that must not mix two of them.

        Raises
        ------
        DatasetChanged
            If it has been written again in the meantime.
        DatasetError
            If it cannot be read any more.
        """
        try:
            now = self._opening.identity(self._store)
        except DatasetError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # It could be read when it was opened.
            raise DatasetError(f"the dataset at {self.url} cannot be read any more: {text}", transient=True) from error
        if now != self._stored_identity:
            raise DatasetChanged(
                f"the dataset at {self.url} was written again while it was in use: its identity was "
                f"{self._stored_identity} and is now {now}. Rows of both must not be mixed. Open it again, and make a "
                "new Shuffler"
            )

    def _sink(self, source: StoredArray, rows: ByteMatrix, offset: int) -> Sink:
        return Sink(source, rows, offset, self._view.window(source.name), self._view.cut(source))

    def _read(
        self,
        sinks: list[Sink],
        ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        memory_budget: int,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        as_integer("memory_budget", memory_budget, 1)
        start = time.perf_counter()
        reader.read_rows(sinks, self._view.items(ids), slots, memory_budget=memory_budget, stop=stop)
        nbytes = sum(
            math.prod(self.arrays[name].shape) * source.dtype.itemsize for name, source in self._sources.items()
        )
        self._meter.add(StoreTraffic(delivered_bytes=ids.size * nbytes, seconds=time.perf_counter() - start))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Say what to do instead: scikit-learn's steps and functions of NumPy call this."""
        hint = (
            'Take rows into memory with dataset.read_rows(ids)["x"], or train with ShuffledSGD(...).fit(dataset), '
            "before which a Pipeline has no other steps."
        )
        raise InvalidParameter.because("a Dataset in place of an array", "its samples are not in memory", hint)

    def __repr__(self) -> str:
        # Storage options may hold secrets and must not appear here.
        arrays = ", ".join(f"{name}: {info.dtype} {info.shape}" for name, info in self.arrays.items())
        left_out = f", without {', '.join(self.skipped)}" if self.skipped else ""
        part = "" if self._view.selection is None else f" of {self._view.n_whole}"
        samples = f"{self.n_samples}{part} samples of {self.row_nbytes} bytes"
        raw = f", not decoded: {', '.join(self.undecoded)}" if self.undecoded else ""
        return f"<Dataset {hide_secrets(self.url)!r}, {samples} ({arrays}){left_out}{raw}>"

    def _repr_html_(self) -> str:
        size = human_bytes(self.n_samples * self.row_nbytes)
        part = "" if self._view.selection is None else f" of {human_count(self._view.n_whole)}"
        facts: dict[str, object] = {
            "samples": human_count(self.n_samples) + part,
            "bytes per sample": self.row_nbytes,
            "size": size,
        }
        if self.undecoded:
            facts["not decoded"] = ", ".join(self.undecoded)
        rows = [(name, info.dtype, info.shape, info.chunk_rows) for name, info in self.arrays.items()]
        headings = ("array", "dtype", "shape of a sample", "rows per chunk")
        return html_summary(f"Dataset {hide_secrets(self.url)}", facts, headings, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # The store does not record which arrays were left out when it was written. How arrays are decoded may depend on
        # the packages of the process that opens it first.
        encodings = {name: source.encoding for name, source in self._sources.items()}
        decoding = Decoding(encodings, dict(self.undecoded))
        return _opened, (self._open, self._opening, self._view, dict(self.skipped), decoding)


def _opened(
    open_again: Callable[[Opening, Decoding], Dataset],
    opening: Opening,
    view: View,
    skipped: dict[str, str],
    decoding: Decoding,
) -> Dataset:
    dataset = dataclasses.replace(open_again(opening, decoding), skipped=MappingProxyType(skipped))
    return dataset if view.is_whole else dataset._seen_as(view)


def _checked_slots(rows: ByteMatrix, slots: ArrayLike, n_samples: int, row_nbytes: int) -> NDArray[np.int64]:
    """Check a matrix that rows are read into, and return the slots as int64: as many distinct rows of it."""
    if not (
        isinstance(rows, np.ndarray)
        and rows.dtype == np.uint8
        and rows.ndim == 2
        and rows.shape[1] == row_nbytes
        and rows.flags.c_contiguous
        and rows.flags.writeable
    ):
        description = f"{type(rows).__name__} {getattr(rows, 'dtype', '')} {getattr(rows, 'shape', '')}".strip()
        raise InvalidParameter.because(
            "rows",
            f"it is not a writeable, C-contiguous (capacity, {row_nbytes}) uint8 matrix (found {description})",
            "Allocate it with the layout's empty().",
        )
    places = as_indices("slots", slots, len(rows), "slots of rows")
    if places.size != n_samples:
        raise InvalidParameter.of("len(slots)", places.size, f"the number of ids ({n_samples})")
    if np.bincount(places).max(initial=0) > 1:
        raise InvalidParameter.because("slots", "some slots are repeated", "Give distinct slots.")
    return places
