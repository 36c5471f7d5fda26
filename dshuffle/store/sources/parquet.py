"""Parquet files as sources: each column of numbers or times is an array, read in batches. Needs pyarrow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.sources.source import RowSource, StreamSource, block_rows, unreadable

# Without a buffer pyarrow fetches the whole column of a row group at once, which may be the whole file.
_BUFFER_NBYTES = 1 << 20


def parquet_arrays(paths: Sequence[str], chosen: set[str] | None) -> dict[str, RowSource]:
    """Open the columns of Parquet files (or folders of them) that together form one table.

    Raises
    ------
    DatasetError
        If a file cannot be read.
    InvalidParameter
        If a column is missing or of a different type in some file, does not hold numbers or times, or has nulls
        according to the statistics in the footers. Other nulls and lists of different lengths are found during reading.
    """
    files = [file for path in paths for file in _files_of(path)]
    first, first_schema = files[0], _opened(files[0]).schema_arrow
    names = [name for name in first_schema.names if chosen is None or name in chosen]
    if len(set(names)) < len(names):
        raise InvalidParameter.of(f"{first}: columns", names, "distinct")
    n_rows = 0
    for file in files:
        with _opened(file) as table:
            n_rows += table.metadata.num_rows
            for name in names:
                _same_type(first, first_schema, file, table.schema_arrow, name)
                _no_nulls_by_statistics(file, table, name)
    return {name: _column(files, name, first_schema.field(name).type, n_rows) for name in names}


def _files_of(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    # Names that start with an underscore (such as _metadata) or a dot are not part of the table.
    parts = sorted(name for name in os.listdir(path) if name.endswith((".parquet", ".pq")) and name[0] not in "._")
    if not parts:
        raise InvalidParameter.of("files", path, "a folder with at least one .parquet or .pq file")
    return [os.path.join(path, name) for name in parts]


def _opened(file: str) -> Any:
    try:
        return pq.ParquetFile(file, buffer_size=_BUFFER_NBYTES, pre_buffer=False)
    except Exception as exc:
        raise unreadable(file, exc) from exc


def _same_type(first: str, schema: Any, file: str, other: Any, name: str) -> None:
    if name not in other.names:
        raise InvalidParameter.because(f"{file}: column {name!r}", f"it is missing, but exists in {first}")
    if other.field(name).type != schema.field(name).type:
        raise InvalidParameter.because(
            f"{file}: column {name!r}",
            f"its type is {other.field(name).type}, but {schema.field(name).type} in {first}",
            "All files must have the same types.",
        )


def _no_nulls_by_statistics(file: str, table: Any, name: str) -> None:
    metadata = table.metadata
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if column.path_in_schema.split(".")[0] == name and column.statistics and column.statistics.null_count:
                raise _nulls(file, name)


def _nulls(file: str, name: str) -> InvalidParameter:
    return InvalidParameter.because(
        f"{file}: column {name!r}", "it contains nulls", "Fill the nulls, or leave the column out."
    )


def table_arrays(data: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a table in memory (anything with the Arrow PyCapsule interface) as arrays.

    Raises
    ------
    InvalidParameter
        If a column has nulls, or does not hold numbers, times or lists of equal length.
    """
    try:
        table = pa.table(data)
    except (pa.ArrowInvalid, TypeError) as exc:
        raise InvalidParameter.because("arrays", f"{type(data).__name__} is not a table ({exc})") from exc
    names = table.column_names
    if len(set(names)) < len(names):
        raise InvalidParameter.of("columns", names, "distinct")
    arrays = {}
    for name in names:
        column = table[name].combine_chunks()

        def first_length(column: Any = column, name: str = name) -> int:
            return _length_of_first("table", name, column)

        sizes, _ = _items("table", name, column.type, first_length)
        arrays[name] = _numbers("table", name, column, len(column), sizes)
    return arrays


def _items(file: str, name: str, kind: Any, first_length: Callable[[], int]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the items of a column."""
    items, sizes = kind, []
    while pa.types.is_fixed_size_list(items):
        sizes.append(items.list_size)
        items = items.value_type
    if not sizes and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        # Many writers do not support lists of fixed size, so the first row sets the length.
        items, sizes = kind.value_type, [first_length()]
    dtype = _dtype(items)
    if dtype is None:
        hint = "Cast it, or leave it out by naming the other columns."
        if pa.types.is_timestamp(items):
            naive = f"timestamp[{items.unit}]"
            hint = f"NumPy's times have no zone. Cast it to {naive} for times in UTC, or leave it out."
        raise InvalidParameter.because(
            f"{file}: column {name!r}",
            f"its type is {kind}, not numbers, booleans, times, or lists of these of equal length",
            hint,
        )
    return tuple(sizes), dtype


def _dtype(items: Any) -> np.dtype[Any] | None:
    """NumPy's dtype of numbers and times; None for other types."""
    if pa.types.is_integer(items) or pa.types.is_floating(items) or pa.types.is_boolean(items):
        numbers: np.dtype[Any] = np.dtype(items.to_pandas_dtype())
        return numbers
    if pa.types.is_timestamp(items) and items.tz is None:
        return np.dtype(f"M8[{items.unit}]")
    if pa.types.is_duration(items):
        return np.dtype(f"m8[{items.unit}]")
    if pa.types.is_date(items):
        return np.dtype("M8[D]" if pa.types.is_date32(items) else "M8[ms]")
    return None


def _column(files: list[str], name: str, kind: Any, n_rows: int) -> RowSource:
    sizes, dtype = _items(files[0], name, kind, lambda: _first_length(files, name))
    shape = (n_rows, *sizes)
    rows = block_rows(shape, dtype)

    def blocks() -> Iterator[NDArray[Any]]:
        for file in files:
            with _opened(file) as table:
                for batch in table.iter_batches(batch_size=rows, columns=[name], use_threads=False):
                    yield _numbers(file, name, batch.column(0), len(batch), shape[1:])

    return StreamSource(", ".join(files), shape, dtype, blocks)


def _first_length(files: list[str], name: str) -> int:
    for file in files:
        with _opened(file) as table:
            for batch in table.iter_batches(batch_size=1, columns=[name], use_threads=False):
                return _length_of_first(file, name, batch.column(0))
    return 0


def _length_of_first(file: str, name: str, values: Any) -> int:
    if not len(values):
        return 0
    if values[:1].null_count:
        raise _nulls(file, name)
    return len(values[0])


def _numbers(file: str, name: str, values: Any, n_rows: int, shape: tuple[int, ...]) -> NDArray[Any]:
    for size in shape:
        if values.null_count:
            raise _nulls(file, name)
        if not pa.types.is_fixed_size_list(values.type):
            lengths = np.diff(values.offsets.to_numpy())
            if (lengths != size).any():
                other = int(lengths[lengths != size][0])
                raise InvalidParameter.because(
                    f"{file}: column {name!r}",
                    f"it has a list of length {other}, but its first list is of length {size}",
                    "All lists must have the same length.",
                )
        values = values.flatten()
    if values.null_count:
        raise _nulls(file, name)
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if len(numbers) != n_rows * int(np.prod(shape)):
        raise DatasetError(f"{file}: column {name!r} has {len(numbers)} numbers in {n_rows} rows")
    return numbers.reshape(n_rows, *shape)
