"""Tables of Arrow as arrays, one for each column: files of Parquet, read in batches, and tables in memory.

Needs pyarrow. Its datasets find the files, partitions and schemas. Batches come from the files themselves: a dataset
decodes a whole row group at once, which may be the whole file, and took three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dshuffle.checks import each
from dshuffle.errors import InvalidParameter
from dshuffle.store.sources.source import RowSource, block_rows, complete, missing, stream, unreadable

# Nanoseconds, the default, reach from 1677 to 2262, and pyarrow wraps what lies outside.
_TIMES: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}
_FORMAT = pa.dataset.ParquetFileFormat(read_options=pa.dataset.ParquetReadOptions(**_TIMES))


def parquet_arrays(tables: Mapping[str, Sequence[str]], chosen: set[str] | None) -> dict[str, RowSource]:
    """Open the columns of Parquet files that together form one table."""
    parts = [part for path, files in tables.items() for part in _parts(path, files)]
    first = parts[0]
    names = _distinct([name for name in first.schema.names if chosen is None or name in chosen])

    def column(name: str) -> RowSource:
        kind = first.schema.field(name).type
        for part in parts:
            if name not in part.schema.names:
                raise InvalidParameter.because(part.label(name), f"it is missing, but exists in {first.path}")
            if (other := part.schema.field(name).type) != kind:
                reason = f"its type is {other}, but {kind} in {first.path}"
                raise InvalidParameter.because(part.label(name), reason, "All files must have the same types.")
            if part.has_nulls(name):
                raise missing(part.label(name), "nulls")
        batches = (batch for part in parts for batch in part.batches(name, 1))
        sizes, dtype = _items(first.label(name), kind, batches)
        shape = (sum(part.metadata.num_rows for part in parts), *sizes)

        def blocks() -> Iterator[NDArray[Any]]:
            for part in parts:
                for batch in part.batches(name, block_rows(shape, dtype)):
                    yield _numbers(part.label(name), batch, sizes)

        return stream(", ".join(part.path for part in parts), shape, dtype, blocks)

    return each(names, column)


def table_arrays(data: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of a table in memory (anything with the Arrow PyCapsule interface) as arrays."""
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
    sizes, _ = _items(label, column.type, iter([column]))
    return _numbers(label, column, sizes)


@dataclass(frozen=True)
class _Part:
    """A file of a table, and the values of the columns that the names of its folders make."""

    path: str
    metadata: Any
    schema: Any
    keys: Mapping[str, Any]

    def label(self, name: str) -> str:
        return f"{self.path}: column {name!r}"

    def has_nulls(self, name: str) -> bool:
        """Whether the footer says so. It counts the items of lists, of which the empty ones would count, too."""
        names, column = self.metadata.schema.names, self.metadata.schema.column
        if name not in names or column(index := names.index(name)).path != name:
            return False
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        return any(known and known.null_count for known in (group.column(index).statistics for group in groups))

    def batches(self, name: str, rows: int) -> Iterator[Any]:
        """The values of a column, in order."""
        if name in self.keys:
            value = pa.scalar(self.keys[name], self.schema.field(name).type)
            for start in range(0, self.metadata.num_rows, rows):
                yield pa.repeat(value, min(rows, self.metadata.num_rows - start))
            return
        # Without a buffer pyarrow fetches the whole column of a row group at once.
        options = {"buffer_size": 1 << 20, "pre_buffer": False, **_TIMES}
        with pq.ParquetFile(self.path, metadata=self.metadata, **options) as file:
            for batch in file.iter_batches(batch_size=rows, columns=[name], use_threads=False):
                yield batch.column(name)  # beside a column "a.b", "a" means both


def _parts(path: str, files: Sequence[str]) -> Iterator[_Part]:
    options: Any = {} if list(files) == [path] else {"partitioning": "hive", "partition_base_dir": path}
    file = files[0]
    try:
        table = pa.dataset.dataset(list(files), format=_FORMAT, filesystem=pa.fs.LocalFileSystem(), **options)
        for part in table.get_fragments():
            file, schema = part.path, part.physical_schema
            keys = pa.dataset.get_partition_keys(part.partition_expression)
            for name in keys:
                schema = schema.append(table.schema.field(name))
            yield _Part(file, part.metadata, schema, keys)
    except Exception as exc:
        raise unreadable(file, exc) from exc


_NUMBERS: tuple[Callable[[Any], bool], ...] = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_duration, pa.types.is_date),
    lambda kind: pa.types.is_timestamp(kind) and kind.tz is None,
)


def _items(label: str, kind: Any, columns: Iterator[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the items of a column."""
    items, sizes = kind, []
    while pa.types.is_fixed_size_list(items):
        sizes.append(items.list_size)
        items = items.value_type
    if not sizes and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        # Many writers do not support lists of fixed size, so the first row sets the length.
        first = next((column[0] for column in columns if len(column)), None)
        if first is not None and not first.is_valid:
            raise missing(label, "nulls")
        items, sizes = kind.value_type, [0 if first is None else len(first)]
    if any(holds(items) for holds in _NUMBERS):
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


def _numbers(label: str, values: Any, sizes: tuple[int, ...]) -> NDArray[Any]:
    n_rows = len(values)
    for size in sizes:
        if values.null_count:
            raise missing(label, "nulls")
        if not pa.types.is_fixed_size_list(values.type):
            lengths = np.diff(values.offsets.to_numpy())
            if (lengths != size).any():
                found = lengths[lengths != size][0]
                reason = f"it has a list of length {found}, but its first list is of length {size}"
                raise InvalidParameter.because(label, reason, "All lists must have the same length.")
        values = values.flatten()
    if values.null_count:
        raise missing(label, "nulls")
    return complete(label, values.to_numpy(zero_copy_only=False)).reshape(n_rows, *sizes)
