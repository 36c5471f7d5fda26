"""Kernels: functions that numba compiles. Numba loads when the first of them is called, and each kernel when it is.

Loading numba and its first kernel takes half a second of processor time, so a process that calls none does without.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
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
    support.declare(Kernel, Instruction)
    return support


class Kernel:
    """A function that numba compiles at its first call, or loads from its cache on disk.

    Other kernels may call it. It has the attributes of numba's dispatchers.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._dispatcher: Any = None
        functools.update_wrapper(self, function)

    @property
    def dispatcher(self) -> Any:
        """What numba makes of the function."""
        with _making:  # one for all threads
            if self._dispatcher is None:
                self._dispatcher = _numba_support().dispatcher(self._function, self._options, self.stamp())
            return self._dispatcher

    def stamp(self) -> str:
        """Return a digest of what the machine code depends on: the function, what it calls, and global numbers."""
        parts = [line for callee in self._called_kernels({}) for line in callee._lines()]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def _called_kernels(self, known: dict[Kernel, None]) -> dict[Kernel, None]:
        """All kernels that are called, itself first, in the order of the calls."""
        known[self] = None
        for value in self._globals().values():
            if isinstance(value, Kernel) and value not in known:
                value._called_kernels(known)
        return known

    def _codes(self) -> Iterator[CodeType]:
        """The code of the function, and of those within it."""
        codes = [self._function.__code__]
        while codes:
            yield codes[-1]
            codes += [value for value in codes.pop().co_consts if isinstance(value, CodeType)]

    def _globals(self) -> dict[str, Any]:
        """Global variables that the function uses."""
        variables = self._function.__globals__
        return {name: variables[name] for code in self._codes() for name in code.co_names if name in variables}

    def _lines(self) -> Iterator[str]:
        """What the function does, without its place: options, code, and the numbers and instructions that it uses."""
        yield f"{sorted(self._options.items())} {self._function.__defaults__}"
        for code in self._codes():
            constants = [value for value in code.co_consts if not isinstance(value, CodeType)]
            yield f"{code.co_code!r} {code.co_names} {code.co_varnames} {constants}"
        for name, value in self._globals().items():
            if isinstance(value, (int, float, str, tuple, np.generic)):
                yield f"{name} = {value!r}"
            elif isinstance(value, Instruction):
                yield f"{name} = {value.name}"

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        dispatcher = self._dispatcher
        return (self.dispatcher if dispatcher is None else dispatcher)(*arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dispatcher, name)

    def __reduce__(self) -> str:
        return str(self.__qualname__)


class Instruction:
    """A machine instruction that kernels may call: a function of :mod:`dshuffle.numba_support`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        """Refuse to run as Python."""
        raise NotImplementedError(f"only kernels can call {self.name}")


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel of a function, which runs without Python's lock and is cached on disk.

    Parameters
    ----------
    **options
        More options of :func:`numba.njit`.

    Examples
    --------
    >>> @kernel(cache=False)
    ... def next_number(number):
    ...     return number + 1
    >>> next_number(1)
    2
    """
    return lambda function: Kernel(function, {"nogil": True, "cache": True, **options})


# ``_nrt=False`` turns off reference counting of arrays, as numba does for its own string functions. Otherwise every row
# costs atomic operations that take longer than the work on a short row. It is safe because callers hold references to
# the arrays and kernels do not allocate any.
row_kernel = functools.partial(kernel, _nrt=False)


FEW = 2**18
"""Items that are processed without numba sooner than numba loads. With numba, a tenth of a second is saved at most."""


def worth_a_kernel(n_items: int) -> bool:
    """Whether a kernel is faster for so many items than NumPy or Python: if numba is loaded, or there are many."""
    return n_items > FEW or "dshuffle.numba_support" in sys.modules


prefetch: Any = Instruction("prefetch_line")


@row_kernel()
def prefetch_row(rows, nbytes, slot):  # type: ignore[no-untyped-def]
    """Prefetch the row in ``slot``; ``rows`` is the address of the row in slot 0."""
    line = rows + np.uint64(slot) * np.uint64(nbytes)
    last = line + np.uint64(min(nbytes, BEGINNING)) - np.uint64(1)
    while line < last:
        prefetch(line)
        line += np.uint64(64)
    prefetch(last)  # rows are not aligned to cache lines
