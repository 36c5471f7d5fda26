"""What all kernels share: how numba compiles them, and how they ask for memory ahead of time."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.cgutils import get_or_insert_function, ir, voidptr_t  # type: ignore[attr-defined]
from numba.extending import intrinsic

BEGINNING = 1024
"""Bytes of a long row that are asked for; then the processor has noticed by itself."""

# Without ``_nrt=False``, which numba compiles its own string functions with, references to the arrays are counted for
# every row, by atomic operations that take longer than the work on short rows. Callers hold the arrays meanwhile, and
# kernels allocate none.
KERNEL: dict[str, Any] = {"nogil": True, "cache": True, "_nrt": False}


def _prefetch_line(typingctx, address):  # type: ignore[no-untyped-def]
    """Begin to bring a cache line, if there is one at this address (numba has no name for that)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        line = builder.inttoptr(args[0], voidptr_t)
        of_type = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
        builder.call(function, [line, number(0), number(3), number(1)])  # of data, to read, into all caches
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


prefetch: Any = intrinsic(_prefetch_line)


@numba.njit(**KERNEL)
def prefetch_row(rows, nbytes, slot):  # type: ignore[no-untyped-def]
    """Begin to bring a row, given where that of slot 0 is."""
    line = rows + np.uint64(slot) * np.uint64(nbytes)
    last = line + np.uint64(min(nbytes, BEGINNING)) - np.uint64(1)
    while line < last:
        prefetch(line)
        line += np.uint64(64)
    prefetch(last)  # rows do not begin where lines do
