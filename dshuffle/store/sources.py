"""Sources of datasets: files of NumPy, Parquet and Zarr, folders of images, and arrays of datasets.

All of them give arrays that are read in ascending slabs and may be larger than memory. Parquet needs pyarrow, and
images need Pillow; both are imported on use.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Self

import numpy as np
from dask.utils import natural_sort_key
from numpy.typing import NDArray

from dshuffle.checks import as_integer, each
from dshuffle.errors import DatasetError, DatasetNotFound, DShuffleError, InvalidParameter
from dshuffle.store.dataset import Dataset, as_dataset, open_dataset
from dshuffle.store.places import Meter, Place, canonical_url, is_local

PARQUET = (".parquet", ".parq", ".pq")

_READ_NBYTES = 16 << 20
"""Zarr is read this many bytes at a time, because a store answers many concurrent requests as fast as one."""

_BLOCK_NBYTES = 4 << 20
"""Parquet is read this many bytes at a time; larger blocks are not faster."""

Values = NDArray[Any]
Blocks = Iterator[Values]
Sources = dict[str, "RowSource"]


@dataclass(frozen=True, slots=True)
class RowSource:
    """An array of a shape that :func:`~dshuffle.store.create_dataset` reads in slabs of ascending rows.

    ``origin`` is a file or URL, or says which store object it is. ``read`` reads the rows of a slice without a step.
    ``classes`` are the names of the classes that the items number, if they do.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], Values]
    classes: tuple[str, ...] = ()

    @property
    def ndim(self) -> int:
        """Number of axes, including the sample axis."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getitem__(self, rows: slice) -> Values:
        """Read the rows of a slice without a step. The array must not be written to."""
        return self.read(rows)


def stream(origin: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Callable[[], Blocks]) -> RowSource:
    """Rows of a stream that can only be read from its beginning, such as a file of Parquet.

    Reading ascending slabs reads the stream once. Reading an earlier slab opens the stream again with ``blocks``, which
    returns an iterator over arrays of consecutive rows. Its exceptions become errors that name the origin.
    """
    n_rows, none = shape[0] if shape else 0, np.empty((0, *shape[1:]), dtype)
    # The stream, rows that have been read, and the index of the first of them: the first slab opens the stream.
    opened: Blocks = iter(())
    rest, at = none, n_rows + 1

    def read(rows: slice) -> Values:
        nonlocal opened, rest, at
        start, stop, _ = rows.indices(n_rows)
        if start < at:
            opened, rest, at = blocks(), none, 0
        pieces, known = [rest], at + len(rest)
        try:
            while known < stop:
                pieces.append(next(opened))
                known += len(pieces[-1])
        except StopIteration:
            raise DatasetError(f"{origin} ended after {known} of {n_rows} rows; was it changed meanwhile?") from None
        except (DShuffleError, MemoryError):
            raise
        except Exception as error:
            raise unreadable(origin, error) from error
        found = np.concatenate(pieces) if len(pieces) > 1 else rest
        slab, rest, at = found[start - at : stop - at], found[stop - at :], stop
        if at == n_rows:
            opened, rest = iter(()), none  # a stream closes its file
        return slab

    return RowSource(origin, shape, dtype, read)


def watched(sources: Sources, progress: Callable[[int, int, str], None]) -> Sources:
    """Wrap sources so that they call ``progress(rows read, total rows, text)``, counting the rows of all arrays."""
    total, done = sum(map(len, sources.values())), 0

    def read(name: str, rows: slice) -> Values:
        nonlocal done
        slab = sources[name][rows]
        done += len(slab)
        progress(done, total, f"rows read: {name}")
        return slab

    return {name: dataclasses.replace(source, read=partial(read, name)) for name, source in sources.items()}


def read_array(dataset: Dataset | Place, name: str) -> RowSource:
    """Return one array of a dataset as a source that is read in ascending slabs."""
    dataset = as_dataset(dataset)
    if name not in dataset.arrays:
        raise InvalidParameter.of("array", name, f"one of {list(dataset.arrays)}")
    info, q = dataset.arrays[name], dataset.n_samples
    part = dataclasses.replace(dataset._only([name]), _meter=Meter())  # labels are not rows that were delivered

    def blocks() -> Blocks:
        for ids in part._slabs(_READ_NBYTES):
            yield part.read_rows(ids)[name]

    return stream(dataset.url, (q, *info.shape), info.dtype, blocks)


# -- Files -------------------------------------------------------------------------------------------------------------


def read_sources(files: Sequence[str | os.PathLike[str]], names: Collection[str] | None = None) -> Sources:
    """Open the arrays in files, for :func:`~dshuffle.store.create_dataset`: all of them, or some by name.

    A file is one of these. Several files or folders of Parquet form one table, in the given order.

    - ``.npy``: one array, named after the file without its suffix.
    - ``.npz``: one array for each member. A member is loaded whole when its turn comes.
    - ``.parquet``, ``.parq``, ``.pq``, or a folder with such files at any depth (extra ``parquet``): one array for
      each column of numbers or times without missing values, or of lists of these of equal length. The files of a
      folder are read in natural order (``part.2`` before ``part.10``).
    - A path or URL of a Zarr group.
    """
    if isinstance(files, str | os.PathLike) or not files:
        raise InvalidParameter.of("files", files, "a list of at least one file")
    chosen = None if names is None else set(names)
    sources: Sources = {}
    tables: list[str] = []
    for place in map(canonical_url, files):
        suffix = os.path.splitext(place)[1].lower()
        if not is_local(place) and suffix in (".npy", ".npz", *PARQUET):
            raise InvalidParameter.of("files", place, "a local path", "Only Zarr is read from URLs.")
        if is_local(place) and not os.path.exists(place):
            raise DatasetNotFound(f"{place} does not exist")
        if parts := _parquet_files(place):
            tables += parts
            continue
        try:
            found = {".npy": _of_npy, ".npz": _of_npz}.get(suffix, _of_zarr)(place)
        except DShuffleError:
            raise
        except Exception as error:
            raise unreadable(place, error) from error
        _add(sources, found, chosen)
    if tables:
        _add(sources, _of_parquet(tables, chosen), chosen)
    if chosen is not None and chosen - sources.keys():
        raise InvalidParameter.of("names", sorted(chosen - sources.keys()), "names of arrays in the files")
    return sources


def _add(sources: Sources, found: Sources, chosen: set[str] | None) -> None:
    for name, source in found.items():
        if name in sources:
            reason = f"{sources[name].origin} and {source.origin} both contain an array {name!r}"
            raise InvalidParameter.because("files", reason, "Give each array a distinct name.")
        if chosen is None or name in chosen:
            sources[name] = source


def _of_npy(path: str) -> Sources:
    load = partial(np.load, path, mmap_mode="r")
    whole = load()
    # Copy the rows and map each slab separately: mapped pages count as process memory while the mapping exists.
    return {Path(path).stem: RowSource(path, whole.shape, whole.dtype, lambda rows: np.array(load()[rows], order="C"))}


def _of_npz(path: str) -> Sources:
    def loaded(name: str) -> Blocks:
        with np.load(path) as archive:
            yield archive[name]

    sources = {}
    with np.load(path) as archive:
        for name in archive.files:
            whole = archive[name]  # NumPy has no other way to its shape
            sources[name] = stream(path, whole.shape, whole.dtype, partial(loaded, name))
    return sources


def _of_zarr(url: str) -> Sources:
    """The arrays directly below a group."""
    if is_local(url) and not os.path.isdir(url):
        kinds = f"a file of .npy, .npz, {', '.join(PARQUET)}, or a Zarr group"
        raise InvalidParameter.of("files", url, kinds, "Read other files, such as CSV, with pandas or Dask.")
    dataset = open_dataset(url)
    return {name: read_array(dataset, name) for name in dataset.arrays}


def files_below(folder: Path, hidden: str, key: Callable[[str], Any], above: tuple[Path, ...] = ()) -> list[Path]:
    """The files at any depth, folder by folder, in the order of their names.

    Names that begin with a character of ``hidden`` are left out. Links to folders are followed, except those that lead
    back to a folder above.
    """
    if (real := folder.resolve()) in above:
        return []
    files: list[Path] = []
    for path in sorted(
        (path for path in folder.iterdir() if path.name[0] not in hidden), key=lambda path: key(path.name)
    ):
        files += files_below(path, hidden, key, (*above, real)) if path.is_dir() else [path]
    return files


def complete(label: str, values: Values) -> Values:
    """Return the values of a column of a table, in which NaN and NaT mean a missing value as nulls do."""
    if values.dtype.kind in "fcmM" and np.isnan(values).any():
        raise _missing(label)
    return values


def _missing(label: str) -> InvalidParameter:
    hint = "Fill the missing values, or leave the column out. Arrays that are not columns of a table may have NaN."
    return InvalidParameter.because(label, "it contains nulls, NaN or NaT", hint)


def unreadable(origin: str, error: Exception) -> DatasetError:
    """Build the error for a file that another library cannot read, with the first line of that library's message."""
    words = str(error).strip().splitlines() or [""]
    return DatasetError(f"cannot read {origin}: {type(error).__name__}: {words[0]}")


def _library(module: str, extra: str) -> Any:
    """Import a library that is an extra of ours."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DatasetError(f"{module} is needed; install it with pip install 'dshuffle[{extra}]' ({error})") from error


# -- Parquet and Arrow -------------------------------------------------------------------------------------------------


def _parquet_files(place: str) -> list[str]:
    """The files of Parquet that a place is or has, in natural order; empty if it is something else."""
    named = place.lower().endswith(PARQUET)
    if not is_local(place) or not os.path.isdir(place):
        return [place] if named else []
    if any(os.path.exists(os.path.join(place, key)) for key in ("zarr.json", ".zgroup", ".zarray")):
        return []
    # Names that start with an underscore (such as _metadata) or a dot are not part of the table.
    parts = [file for file in files_below(Path(place), "._", natural_sort_key) if file.suffix.lower() in PARQUET]
    if folders := [file for file in parts if "=" in str(file.parent.relative_to(place))]:
        reason = f"{folders[0]} is in a folder that is a column"
        raise InvalidParameter.because("files", reason, "Read such a table with dask.dataframe.read_parquet.")
    return list(map(str, parts))


def _of_parquet(paths: Sequence[str], chosen: set[str] | None) -> Sources:
    """The columns of files that together form one table.

    Batches come from the files themselves: a dataset of pyarrow decodes a whole row group at once, which may be the
    whole file, and took three times as long.
    """
    parquet, pa = _library("pyarrow.parquet", "parquet"), _library("pyarrow", "parquet")
    # Nanoseconds, the default, reach from 1677 to 2262, and pyarrow wraps what lies outside. Without a buffer it
    # fetches the whole column of a row group at once.
    options = {"coerce_int96_timestamp_unit": "us", "buffer_size": 1 << 20, "pre_buffer": False}
    opened = {}
    for path in paths:
        try:
            with parquet.ParquetFile(path, **options) as file:
                opened[path] = file.metadata, file.schema_arrow
        except Exception as error:
            raise unreadable(path, error) from error
    schema, n_rows = opened[paths[0]][1], sum(metadata.num_rows for metadata, _ in opened.values())

    def column(name: str) -> RowSource:
        label, kind = f"{paths[0]}: column {name!r}", schema.field(name).type
        for path, (metadata, other) in opened.items():
            here = f"{path}: column {name!r}"
            if name not in other.names:
                raise InvalidParameter.because(here, f"it is missing, and {paths[0]} has it")
            if other.field(name).type != kind:
                reason = f"its type is {other.field(name).type}, but {kind} in {paths[0]}"
                raise InvalidParameter.because(here, reason, "All files must have the same types.")
            if _has_nulls(metadata, name):  # before an earlier dataset is replaced
                raise _missing(here)

        def blocks(rows: int) -> Blocks:
            for path, (metadata, _) in opened.items():
                with parquet.ParquetFile(path, metadata=metadata, **options) as file:
                    for batch in file.iter_batches(batch_size=rows, columns=[name], use_threads=False):
                        # Beside a column "a.b", "a" means both.
                        yield arrow_column(f"{path}: column {name!r}", batch.column(name))

        sample = next(blocks(1), arrow_column(label, pa.array([], kind)))

        def alike() -> Blocks:
            for values in blocks(max(1, _BLOCK_NBYTES // max(1, sample[:1].nbytes))):
                if values.shape[1:] != sample.shape[1:]:
                    raise InvalidParameter.because(label, "its lists differ in length")
                yield values

        return stream(", ".join(paths), (n_rows, *sample.shape[1:]), sample.dtype, alike)

    return each(distinct([name for name in schema.names if chosen is None or name in chosen]), column)


def _has_nulls(metadata: Any, name: str) -> bool:
    """Whether the footer of a file says so. It counts the items of lists, of which the empty ones would count, too."""
    names, column = metadata.schema.names, metadata.schema.column
    if name not in names or column(index := names.index(name)).path != name:
        return False
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return any(known and known.null_count for known in (group.column(index).statistics for group in groups))


def arrow_table(data: Any) -> dict[str, Values]:
    """Return the columns of a table in memory (anything with the Arrow PyCapsule interface) as arrays."""
    try:
        table = _library("pyarrow", "parquet").table(data)
    except (TypeError, ValueError) as error:  # that of Arrow is one
        raise InvalidParameter.because("arrays", f"{type(data).__name__} is not a table ({error})") from error
    return each(distinct(table.column_names), lambda name: arrow_column(f"column {name!r}", table[name]))


def distinct(names: list[Any]) -> list[Any]:
    """Return the names of columns, if they are."""
    if len(set(names)) < len(names):
        raise InvalidParameter.of("columns", names, "distinct")
    return names


def arrow_column(label: str, values: Any) -> Values:
    """Return the values of a column of Arrow, or of what Arrow makes one of: numbers, times, or lists of these."""
    pa, compute = _library("pyarrow", "parquet"), _library("pyarrow.compute", "parquet")
    hint = (
        "Columns must be numbers, booleans, times without a zone, or lists of these of equal length: cast them, as "
        "with .cat.codes and .dt.tz_convert(None) of pandas, or leave them out by naming the others."
    )
    try:
        column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidParameter.because(label, f"Arrow cannot convert its items ({error})", hint) from error
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind, shape = column.type, [len(column)]
    while hasattr(column.type, "value_field"):  # a list
        if column.null_count:
            raise _missing(label)
        lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False)).tolist()
        if len(lengths) > 1:
            raise InvalidParameter.because(label, f"it has lists of length {lengths[0]} and {lengths[1]}", hint)
        shape.append(lengths[0] if lengths else 0)
        column = column.flatten()
    if column.null_count:
        raise _missing(label)
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.hasobject or getattr(column.type, "tz", None):
        raise InvalidParameter.because(label, f"its type is {kind}", hint)
    return complete(label, array).reshape(shape)


# -- Folders of images -------------------------------------------------------------------------------------------------

SUFFIXES = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
Size = tuple[int, int]
CHANNELS = {"L": (), "RGB": (3,)}
"""Axes of a pixel in each mode: grey, and red, green and blue."""


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Images and their classes, for :func:`~dshuffle.store.create_dataset`.

    Parameters
    ----------
    arrays
        ``x``: ``(n, height, width, 3)`` uint8, or ``(n, height, width)`` if the images are grey. ``y``: ``(n,)`` int64,
        the number of the class. In the dataset this array has the attribute ``classes``, a list of the names.
    classes
        Names of the folders in ascending order. Class k is ``classes[k]``.
    other_files
        Visible files beside the images, which were left out.
    """

    arrays: Sources
    classes: tuple[str, ...]
    other_files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, size: Sequence[int] | None = None) -> Self:
        """Find the images. They are read when the dataset is written."""
        if size is not None and np.shape(size) != (2,):
            raise InvalidParameter.of("size", size, "height and width, such as (64, 64)")
        asked = None if size is None else (as_integer("size[0]", size[0], 1), as_integer("size[1]", size[1], 1))
        root = Path(folder)
        if not root.is_dir():
            raise DatasetNotFound(f"{root} is not a folder")
        classes = [path for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."]
        found = {path: files_below(path, ".", str, (root.resolve(),)) for path in classes}
        images = {path.name: [file for file in found[path] if file.suffix.lower() in SUFFIXES] for path in found}
        if not all(images.values()) or not images:
            kinds = f"a folder with a folder of images ({', '.join(SUFFIXES)}) for each class"
            hint = "".join(f"{root / name} has no image. " for name, files in images.items() if not files)
            raise InvalidParameter.of(
                "folder", str(root), kinds, f"{hint}Convert its files, or move it." if hint else ""
            )
        labels = np.repeat(np.arange(len(images)), list(map(len, images.values())))
        paths = list(itertools.chain(*images.values()))
        shape, mode = _common(paths, asked)

        def read(rows: slice) -> Values:
            with ThreadPool() as pool:  # decoders release the GIL
                return np.stack(pool.map(lambda path: _pixels(path, shape, mode), paths[rows]))

        pixels = RowSource(str(root), (len(paths), *shape, *CHANNELS[mode]), np.dtype(np.uint8), read)
        numbers = RowSource(str(root), labels.shape, labels.dtype, labels.__getitem__, tuple(images))
        others = [file for files in found.values() for file in files if file.suffix.lower() not in SUFFIXES]
        return cls({"x": pixels, "y": numbers}, tuple(images), tuple(others))


def _common(paths: Sequence[Path], size: Size | None) -> tuple[Size, str]:
    """The size of all images, and whether they are all grey, by their headers."""

    def header(path: Path) -> tuple[Size, bool]:
        """Height and width of an image, as its orientation in the EXIF data shows it, and whether it is grey."""
        with _opened(path) as image:
            turned = image.getexif().get(0x0112, 1) >= 5
            return (image.size if turned else image.size[::-1]), image.mode in ("1", "L", "LA")

    with ThreadPool() as pool:
        headers = pool.map(header, paths)
    first = headers[0][0]
    for path, (found, _) in zip(paths, headers, strict=True):
        if size is None and found != first:
            raise InvalidParameter(
                f"size is needed, as images differ in size: {paths[0]} has {first[0]} x {first[1]} pixels "
                f"(height x width), and {path} {found[0]} x {found[1]}. Give the height and width that all should have"
            )
    return size or first, "L" if all(is_grey for _, is_grey in headers) else "RGB"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    image = _library("PIL.Image", "images")
    try:
        with image.open(path) as opened:
            yield opened
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise unreadable(str(path), error) from error


def _pixels(path: Path, size: Size, mode: str) -> NDArray[np.uint8]:
    pillow, operations = _library("PIL.Image", "images"), _library("PIL.ImageOps", "images")
    with _opened(path) as image:
        if image.mode.startswith(("I", "F")):  # Pillow would clip the values
            raise DatasetError(
                f"{path} has the mode {image.mode}, with more than eight bits for each channel, which would be "
                "clipped. Scale it to eight bits, or write the values yourself with create_dataset"
            )
        upright = operations.exif_transpose(image)
        if image.has_transparency_data:  # hidden colours must not show
            upright = pillow.alpha_composite(pillow.new("RGBA", upright.size, "black"), upright.convert("RGBA"))
        upright = upright.convert(mode)
    if upright.size != size[::-1]:
        upright = operations.fit(upright, size[::-1], pillow.Resampling.BILINEAR)
    return np.asarray(upright)
