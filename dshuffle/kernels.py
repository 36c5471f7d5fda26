"""Compiler options and memory prefetching for all numba kernels."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.cgutils import get_or_insert_function, ir, voidptr_t  # type: ignore[attr-defined]
from numba.extending import intrinsic

BEGINNING = 1024
"""Bytes of a long row to prefetch. After that the hardware prefetcher has detected the access pattern."""

# ``_nrt=False`` turns off reference counting of arrays, as numba does for its own string functions. Otherwise every row
# costs atomic operations that take longer than the work on a short row. It is safe because callers hold references to
# the arrays and kernels do not allocate any.
KERNEL: dict[str, Any] = {"nogil": True, "cache": True, "_nrt": False}


def _prefetch_line(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address, which may be invalid. Numba does not expose this instruction."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        line = builder.inttoptr(args[0], voidptr_t)
        of_type = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
        builder.call(function, [line, number(0), number(3), number(1)])  # read access, all cache levels, data cache
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


prefetch: Any = intrinsic(_prefetch_line)


@numba.njit(**KERNEL)
def prefetch_row(rows, nbytes, slot):  # type: ignore[no-untyped-def]
    """Prefetch the row in ``slot``; ``rows`` is the address of the row in slot 0."""
    line = rows + np.uint64(slot) * np.uint64(nbytes)
    last = line + np.uint64(min(nbytes, BEGINNING)) - np.uint64(1)
    while line < last:
        prefetch(line)
        line += np.uint64(64)
    prefetch(last)  # rows are not aligned to cache lines
