"""Numba's cache of machine code on disk, with a check of what is loaded from it.

Numba finds code by an index, which it writes before the code. Meanwhile another process may take what an older version
has left under the same name: it fails to load, or is another function. Two processes that compile for different
processors may also choose the same name. Numba does not notice either if a function that this one calls has changed in
another file. Here each file begins with a label: version, stamp and signature. Code with another label is compiled
again.

Numba reads from one folder, the first that it can write. Here code that lies beside the module is also found by users
who cannot write there.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import numba
from numba.core import caching

logger = logging.getLogger(__name__)

# Numba 0.68 removed the underscore.
_NAMES = ("InTreeCacheLocator", "_InTreeCacheLocator")
InTreeCacheLocator: Any = next(getattr(caching, name) for name in _NAMES if hasattr(caching, name))


class UnwritableLocator(InTreeCacheLocator):
    """Code beside the module, for users who can write no folder at all."""

    def ensure_cache_path(self) -> None:
        """Do nothing. Saving fails later."""


class KernelCacheImpl(caching.CompileResultCacheImpl):
    """What is cached of a kernel."""

    _locator_classes = (*caching.CompileResultCacheImpl._locator_classes, UnwritableLocator)  # type: ignore[assignment]


class KernelCache(caching.FunctionCache):
    """The cache of a kernel.

    Parameters
    ----------
    function
        The kernel as Python.
    stamp
        What its machine code depends on beside its own file and the version of numba.
    """

    _impl_class = KernelCacheImpl

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        folder, beside = self._impl.locator.get_cache_path(), os.path.dirname(function.__code__.co_filename)
        name = f"{self._impl.filename_base}.numba-{numba.__version__}"  # versions do not overwrite each other's index
        make = functools.partial(
            LabelledFiles, filename_base=name, source_stamp=(self._impl.locator.get_source_stamp(), stamp)
        )
        self._cache_file = make(folder)
        self._beside = make(os.path.join(beside, "__pycache__"))

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        code = super()._load_overload(sig, target_context)
        if code is None and self._beside._cache_path != self._cache_file._cache_path:
            data = self._beside.load(self._index_key(sig, target_context.codegen()))
            code = None if data is None else self._impl.rebuild(target_context, data)
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save code. Where it cannot be saved, each process compiles for itself."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_of_unsaved_code(self.cache_path, error.strerror or str(error))  # once: names of files differ


class LabelledFiles(caching.IndexDataCacheFile):
    """An index and files of machine code, each of which begins with its version, its stamp, and its signature."""

    def save(self, key: Any, data: Any) -> None:
        """Save code with its label."""
        super().save(key, (self._label(), self._dump((key, data))))

    def load(self, key: Any) -> Any:
        """Load the code of a signature, or return None if no file has exactly this label."""
        try:
            label, content = super().load(key) or (None, b"")
            if label == self._label():
                saved_key, data = pickle.loads(content)
                return data if saved_key == key else None
        except Exception as error:  # a file of another version, or one that was cut short, can raise any
            logger.debug("dshuffle: %s is compiled again: %r", self._index_name, error)
        return None

    def _label(self) -> tuple[Any, ...]:
        return self._version, self._source_stamp

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except OSError:  # an index that cannot be read now is not written anew
            raise
        except Exception:  # it was cut short, or is of another version
            return {}


@functools.cache
def _warn_of_unsaved_code(folder: str, reason: str) -> None:
    logger.warning(
        "dshuffle: compiled kernels cannot be kept in %s (%s), so every process compiles them for itself. Set "
        "NUMBA_CACHE_DIR to a folder that can be written.",
        folder,
        reason,
    )
