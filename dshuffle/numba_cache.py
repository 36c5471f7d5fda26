"""Numba's cache of machine code on disk, with a check of what is loaded from it.

Numba finds code by an index, which it writes before the code. Meanwhile another process may take what an older version
has left under the same name: it fails to load, or is another function. Two processes that compile for different
processors may also choose the same name. Numba does not notice either if a function that this one calls has changed in
another file. Here each file says what it is of, and whatever is of something else is compiled again.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

logger = logging.getLogger(__name__)


class KernelCache(FunctionCache):
    """The cache of a kernel.

    Parameters
    ----------
    function
        The kernel as Python.
    stamp
        What its machine code depends on beside its own file and the version of numba.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._cache_file = LabelledFiles(
            locator.get_cache_path(), self._impl.filename_base, (locator.get_source_stamp(), stamp)
        )


class LabelledFiles(IndexDataCacheFile):
    """An index and files of machine code, each of which begins with its version, its stamp, and its signature."""

    def save(self, key: Any, data: Any) -> None:
        """Save code with its label."""
        super().save(key, (self._label(), self._dump((key, data))))

    def load(self, key: Any) -> Any:
        """Load the code of a signature, or return None if there is none that is surely of it."""
        try:
            label, content = super().load(key) or (None, b"")
            if label == self._label():
                of, data = pickle.loads(content)
                return data if of == key else None
        except Exception as error:  # of a file that another version has written, or that was cut short, it may be any
            logger.debug("dshuffle: %s is compiled again: %r", self._index_name, error)
        return None

    def _label(self) -> tuple[Any, ...]:
        return self._version, self._source_stamp

    def _load_index(self) -> Any:
        with contextlib.suppress(Exception):  # as above
            return super()._load_index()
        return {}
