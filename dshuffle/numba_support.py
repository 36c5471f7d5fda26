"""What :mod:`dshuffle.kernels` needs of numba: its compiler, and machine instructions that it does not expose."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core.cgutils import get_or_insert_function, ir, voidptr_t  # type: ignore[attr-defined]
from numba.core.registry import cpu_target
from numba.extending import intrinsic, typeof_impl

try:
    from dshuffle.numba_cache import KernelCache
except (ImportError, AttributeError):  # a later release, whose own cache is used until this one knows it
    KernelCache = None  # type: ignore[assignment, misc]


def dispatcher(function: Callable[..., Any], options: dict[str, Any], stamp: str) -> Any:
    """Return the function as numba calls it: compiled, or loaded from the cache on disk, at its first call.

    Parameters
    ----------
    function
        The function.
    options
        Those of :func:`numba.njit`.
    stamp
        What its machine code depends on beside its own file.
    """
    if KernelCache is None:
        return numba.njit(**options)(function)
    made = numba.njit(**{**options, "cache": False})(function)
    if options.get("cache"):
        made._cache = KernelCache(function, f"{stamp} {_own_source()}")  # what `cache=True` does, with another class
    return made


@functools.cache
def _own_source() -> str:
    """The code of the instructions below, if it is installed as source."""
    try:
        return inspect.getsource(sys.modules[__name__])
    except OSError:
        return ""


@intrinsic
def prefetch_line(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address, which may be invalid."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        line = builder.inttoptr(args[0], voidptr_t)
        of_type = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
        builder.call(function, [line, number(0), number(3), number(1)])  # read access, all cache levels, data cache
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


@intrinsic
def count_bits(typingctx, word):  # type: ignore[no-untyped-def]
    """Number of set bits of a uint64."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def count_trailing_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    """Index of the lowest set bit of a uint64, or 64 if no bit is set."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        zero_is_undefined = context.get_constant(types.boolean, False)
        return builder.cttz(args[0], zero_is_undefined)

    return types.uint64(types.uint64), codegen


def declare(kernel_type: type, instruction_type: type) -> None:
    """Let kernels call other kernels, and instructions of this module, which are objects of these types."""
    typeof_impl.register(kernel_type)(lambda kernel, context: types.Dispatcher(kernel.dispatcher))
    typeof_impl.register(instruction_type)(lambda instruction, context: _type_of(globals()[instruction.name]))


def _type_of(instruction: Any) -> Any:
    return cpu_target.typing_context.resolve_value_type(instruction)
