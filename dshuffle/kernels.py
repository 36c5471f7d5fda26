"""Kernels: functions that numba compiles. Numba loads when the first of them is called, and each kernel when it is.

Loading numba and its first kernel takes half a second of processor time, so a process that calls none does without.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

BEGINNING = 1024
"""Bytes of a long row to prefetch. After that the hardware prefetcher has detected the access pattern."""

_making = threading.RLock()
# A forked process could never get a lock that another thread held.
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


@functools.cache
def _numba_support() -> Any:
    support = importlib.import_module("dshuffle.numba_support")
    support.declare(Kernel)
    return support


class Kernel:
    """A function that numba compiles when it is first called, or loads from the cache on disk. Kernels may call it.

    Parameters
    ----------
    signatures
        Types of its arguments, as numba writes them, such as ``"(u8[:,::1], i8)"``: what :func:`load_kernels` compiles.
        Other types are compiled when they are met. Kernels that only kernels call need none.
    """

    def __init__(self, function: Callable[..., Any], signatures: tuple[str, ...] = (), **options: Any) -> None:
        self._function, self.signatures, self._options = function, signatures, options
        self._dispatcher: Any = None
        functools.update_wrapper(self, function)

    @property
    def dispatcher(self) -> Any:
        """What numba makes of the function."""
        with _making:  # one for all threads
            if self._dispatcher is None:
                stamp = "\n".join(self._parts({self}))
                self._dispatcher = _numba_support().dispatcher(self._function, self._options, stamp)
            return self._dispatcher

    def _parts(self, known: set[Kernel]) -> Iterator[str]:
        """What the machine code depends on: code, constants, and the numbers and kernels among the global variables."""
        yield f"{sorted(self._options.items())} {self._function.__defaults__}"
        codes = [self._function.__code__]
        for code in codes:  # with those of functions within it
            yield f"{code.co_code!r} {code.co_names} {code.co_varnames}"
            for value in (*code.co_consts, *map(self._function.__globals__.get, code.co_names)):
                if isinstance(value, CodeType):
                    codes.append(value)
                elif isinstance(value, Kernel):
                    if value not in known:
                        known.add(value)
                        yield from value._parts(known)
                elif isinstance(value, int | float | str | tuple | np.generic):
                    yield repr(value)

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        dispatcher = self._dispatcher
        return (self.dispatcher if dispatcher is None else dispatcher)(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dispatcher, name)  # numba asks for its options where it inlines kernels

    def __reduce__(self) -> str:
        return str(self.__qualname__)


def kernel(*signatures: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a :class:`Kernel` of a function, which runs without Python's lock and is cached on disk."""
    return lambda function: Kernel(function, signatures, **{"nogil": True, "cache": True, **options})


# ``_nrt=False`` turns off reference counting of arrays, as numba does for its own string functions. Otherwise every row
# costs atomic operations that take longer than the work on a short row. It is safe because callers hold references to
# the arrays and kernels do not allocate any.
row_kernel = functools.partial(kernel, _nrt=False)


def load_kernels(*modules: str) -> None:
    """Load the kernels of modules of dshuffle, or compile them if no process has."""
    for name in modules:
        for value in vars(importlib.import_module(f"dshuffle.{name}")).values():
            for signature in value.signatures if isinstance(value, Kernel) else ():
                value.dispatcher.compile(signature)


def compile_kernels() -> None:
    """Load all kernels of dshuffle, or compile them, which takes half a minute of processor time.

    Processes that start later load the code from the disk.
    """
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "kernel(" in path.read_text():
            load_kernels(".".join(path.relative_to(root).with_suffix("").parts))


FEW = 2**18
"""Items that are processed without numba sooner than numba loads. With numba, a tenth of a second is saved at most."""


def worth_a_kernel(n_items: int) -> bool:
    """Whether a kernel is faster for so many items than NumPy or Python: if numba is loaded, or there are many."""
    return n_items > FEW or "dshuffle.numba_support" in sys.modules


@kernel(cache=False, instruction=True)  # of the same name in numba_support
def prefetch(line: Any) -> Any:
    """Prefetch the cache line at an address, which may be invalid. Only kernels can call this."""


@row_kernel()
def prefetch_row(rows, nbytes, slot):  # type: ignore[no-untyped-def]
    """Prefetch the row in ``slot``; ``rows`` is the address of the row in slot 0."""
    line = rows + np.uint64(slot) * np.uint64(nbytes)
    last = line + np.uint64(min(nbytes, BEGINNING)) - np.uint64(1)
    while line < last:
        prefetch(line)
        line += np.uint64(64)
    prefetch(last)  # rows are not aligned to cache lines
