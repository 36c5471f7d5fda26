"""Tables of Arrow as arrays, one for each column: files of Parquet, read in batches, and tables in memory.

Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dshuffle.checks import each
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.sources.source import RowSource, block_rows, complete, missing, stream, unreadable

FORMAT = pa.dataset.ParquetFileFormat(
    # Nanoseconds, the default, reach from 1677 to 2262, and pyarrow wraps what lies outside.
    read_options=pa.dataset.ParquetReadOptions(coerce_int96_timestamp_unit="us")
)


def parquet_arrays(tables: Mapping[str, Sequence[str]], chosen: set[str] | None) -> dict[str, RowSource]:
    """Open the columns of Parquet files that together form one table.

    Parameters
    ----------
    tables
        Files or folders, and the files of each. Names of folders such as ``year=2020`` are columns, too.
    chosen
        Names of the columns to take; None for all.

    Raises
    ------
    DatasetError
        If a file cannot be read.
    InvalidParameter
        If columns are missing or of a different type in some file, do not hold numbers or times, or have nulls
        according to the statistics in the footers. Other nulls and lists of different lengths are found during reading.
    """
    parts = [part for path, files in tables.items() for part in _parts(path, files)]
    first = parts[0]
    names = _distinct([name for name in first.schema.names if chosen is None or name in chosen])

    def column(name: str) -> RowSource:
        for part in parts:
            part.check(name, first)
        return _column(parts, name, first.schema.field(name).type)

    return each(names, column)


def table_arrays(data: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a table in memory (anything with the Arrow PyCapsule interface) as arrays.

    Raises
    ------
    InvalidParameter
        If columns have missing values, or do not hold numbers, times or lists of equal length.
    """
    try:
        table = pa.table(data)
    except (pa.ArrowInvalid, TypeError) as exc:
        raise InvalidParameter.because("arrays", f"{type(data).__name__} is not a table ({exc})") from exc
    return each(_distinct(table.column_names), lambda name: column_array(f"column {name!r}", table[name]))


def _distinct(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise InvalidParameter.of("columns", names, "distinct")
    return names


def column_array(label: str, values: Any) -> NDArray[Any]:
    """Return the values of a column of Arrow, or of what Arrow makes one of."""
    try:
        column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as exc:
        reason = f"its items are Python objects that Arrow cannot convert ({exc})"
        raise InvalidParameter.because(label, reason, "Cast it, or leave it out.") from exc
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    sizes, _ = _items(label, column.type, lambda: _length_of_first(label, column))
    return _numbers(label, column, sizes)


class _Part:
    """A file of a table, and the values of the columns that the names of its folders make."""

    def __init__(self, path: str, metadata: Any, schema: Any, keys: Mapping[str, Any]) -> None:
        self.path, self.metadata, self.schema, self.keys = path, metadata, schema, keys
        columns = ((index, metadata.schema.column(index)) for index in range(metadata.num_columns))
        # Columns without items of their own: the statistics of a list would count empty lists, too.
        self._flat = {column.path: index for index, column in columns if column.name == column.path}

    def check(self, name: str, first: _Part) -> None:
        """Refuse a column that is not as in the first file, or has nulls according to the footer."""
        label = f"{self.path}: column {name!r}"
        if name not in self.schema.names:
            raise InvalidParameter.because(label, f"it is missing, but exists in {first.path}")
        if (kind := self.schema.field(name).type) != (right := first.schema.field(name).type):
            reason = f"its type is {kind}, but {right} in {first.path}"
            raise InvalidParameter.because(label, reason, "All files must have the same types.")
        index, groups = self._flat.get(name), range(self.metadata.num_row_groups)
        known = (self.metadata.row_group(group).column(index).statistics for group in groups if index is not None)
        if any(statistics and statistics.null_count for statistics in known):
            raise missing(label, "nulls")

    def batches(self, name: str, rows: int) -> Iterator[Any]:
        """The values of a column, in order."""
        if name in self.keys:
            value = pa.scalar(self.keys[name], self.schema.field(name).type)
            for start in range(0, self.metadata.num_rows, rows):
                yield pa.repeat(value, min(rows, self.metadata.num_rows - start))
            return
        # Without a buffer pyarrow fetches the whole column of a row group at once, which may be the whole file.
        options = {"buffer_size": 1 << 20, "pre_buffer": False, "coerce_int96_timestamp_unit": "us"}
        with pq.ParquetFile(self.path, metadata=self.metadata, **options) as file:
            for batch in file.iter_batches(batch_size=rows, columns=[name], use_threads=False):
                yield batch.column(name)  # beside a column "a.b", "a" means both


def _parts(path: str, files: Sequence[str]) -> Iterator[_Part]:
    options: Any = {} if list(files) == [path] else {"partitioning": "hive", "partition_base_dir": path}
    file = files[0]
    try:
        table = pa.dataset.dataset(list(files), format=FORMAT, filesystem=pa.fs.LocalFileSystem(), **options)
        for part in table.get_fragments():
            file, schema = part.path, part.physical_schema
            keys = pa.dataset.get_partition_keys(part.partition_expression)
            for name in keys:
                schema = schema.append(table.schema.field(name))
            yield _Part(file, part.metadata, schema, keys)
    except Exception as exc:
        raise unreadable(file, exc) from exc


def _items(label: str, kind: Any, first_length: Callable[[], int]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the items of a column."""
    items, sizes = kind, []
    while pa.types.is_fixed_size_list(items):
        sizes.append(items.list_size)
        items = items.value_type
    if not sizes and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        # Many writers do not support lists of fixed size, so the first row sets the length.
        items, sizes = kind.value_type, [first_length()]
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_duration, pa.types.is_date)
    if any(holds(items) for holds in numbers) or (pa.types.is_timestamp(items) and items.tz is None):
        return tuple(sizes), pa.array([], items).to_numpy(zero_copy_only=False).dtype
    hint = (
        "Columns must be numbers, booleans, times, or lists of these of equal length: cast them (class labels of "
        "pandas: .cat.codes), or leave them out by naming the others."
    )
    if pa.types.is_timestamp(items):
        hint = (
            f"NumPy's times have no zone: cast them to timestamp[{items.unit}] in UTC (pandas: .dt.tz_convert(None))."
        )
    raise InvalidParameter.because(label, f"its type is {kind}", hint)


def _column(parts: list[_Part], name: str, kind: Any) -> RowSource:
    def label(part: _Part) -> str:
        return f"{part.path}: column {name!r}"

    def first_length() -> int:
        firsts = ((part, batch) for part in parts for batch in part.batches(name, 1))
        return next((_length_of_first(label(part), batch) for part, batch in firsts), 0)

    sizes, dtype = _items(label(parts[0]), kind, first_length)
    shape = (sum(part.metadata.num_rows for part in parts), *sizes)

    def blocks() -> Iterator[NDArray[Any]]:
        for part in parts:
            for batch in part.batches(name, block_rows(shape, dtype)):
                yield _numbers(label(part), batch, sizes)

    return stream(", ".join(part.path for part in parts), shape, dtype, blocks)


def _length_of_first(label: str, values: Any) -> int:
    if not len(values):
        return 0
    if values[:1].null_count:
        raise missing(label, "nulls")
    return len(values[0])


def _numbers(label: str, values: Any, sizes: tuple[int, ...]) -> NDArray[Any]:
    n_rows = len(values)
    for size in sizes:
        if values.null_count:
            raise missing(label, "nulls")
        if not pa.types.is_fixed_size_list(values.type):
            lengths = np.diff(values.offsets.to_numpy())
            if (lengths != size).any():
                reason = (
                    f"it has a list of length {lengths[lengths != size][0]}, but its first list is of length {size}"
                )
                raise InvalidParameter.because(label, reason, "All lists must have the same length.")
        values = values.flatten()
    if values.null_count:
        raise missing(label, "nulls")
    numbers = complete(label, values.to_numpy(zero_copy_only=False))
    if len(numbers) != n_rows * int(np.prod(sizes)):
        raise DatasetError(f"{label} has {len(numbers)} numbers in {n_rows} rows")
    return numbers.reshape(n_rows, *sizes)
