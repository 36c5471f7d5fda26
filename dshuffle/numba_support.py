"""What :mod:`dshuffle.kernels` needs of numba: its compiler, a cache of machine code, and a machine instruction.

Numba's own cache has an index for each function, in which two processes that write at the same time, or two versions,
can meet each other's code. Here every function and signature has a file of its own. Its folder is named after the
version of numba and the processor, and the file after everything else that the code depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import caching, cgutils, compiler, compiler_lock, serialize, sigutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, typeof_impl

from dshuffle.private_files import cache_folder, lock_file, replace_file

logger = logging.getLogger(__name__)

PATIENCE = 300.0
"""Seconds to wait for another process that compiles. After that this one compiles as well."""

_compiling = False  # whether this process has its turn; changed under numba's lock


def dispatcher(function: Callable[..., Any], options: dict[str, Any], stamp: str) -> Any:
    """Return the function as numba calls it: compiled, or loaded from the disk, for each signature that it meets."""
    if "instruction" in options:
        return globals()[function.__name__]
    made = numba.njit(**{**options, "cache": False})(function)
    if options["cache"]:
        made._cache = _CodeFiles(f"{function.__module__}.{function.__qualname__}", stamp)
        made.compile = functools.partial(_compiled_once, made.compile, made._cache)
    return made


class _CodeFiles(caching.NullCache):
    """The files of the machine code of a kernel, as numba uses a cache."""

    def __init__(self, name: str, stamp: str) -> None:
        self._name, self._stamp = name, stamp

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the code of a signature; None if there is none."""
        target_context.refresh()
        for path in self.paths(sig):
            with contextlib.suppress(Exception):  # it is missing, or was cut short, which can raise any error
                return compiler.CompileResult._rebuild(target_context, *pickle.loads(path.read_bytes()))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save code. Where it cannot be saved, each process compiles for itself."""
        for path in self.paths(sig):
            try:
                return replace_file(str(path), serialize.dumps(data._reduce()), 0o644)
            except OSError as error:
                reason = error.strerror or str(error)
        _warn(
            f"compiled kernels cannot be kept in {path.parent} ({reason}), so every process compiles them for itself. "
            "Set NUMBA_CACHE_DIR to a folder that can be written"
        )

    def paths(self, sig: Any) -> list[Path]:
        """Where the code of a signature may be."""
        return [folder / f"{self._name}-{_digest(self._stamp, sig)}" for folder in _folders()]


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


@functools.cache
def _folders() -> list[Path]:
    """Folders of machine code: the first that can be written gets more of it."""
    machine = cpu_target.target_context.codegen().magic_tuple()
    name = f"kernels-{numba.__version__}-{machine[1]}-{_digest(sys.version, machine)}"
    if chosen := numba.config.CACHE_DIR:  # type: ignore[attr-defined]
        return [Path(chosen, "dshuffle", name)]
    folders = [Path(__file__).parent / "__pycache__" / name]
    if not os.access(Path(__file__).parent, os.W_OK):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home directory
            folders.append(cache_folder() / name)
    return folders


def _compiled_once(compile_: Callable[[Any], Any], files: _CodeFiles, signature: Any) -> Any:
    """Compile for a signature, while other processes that need machine code wait; or load the code."""
    global _compiling
    signature = sigutils.normalize_signature(signature)[0]
    with compiler_lock.global_compiler_lock, contextlib.ExitStack() as opened:
        if _compiling or any(
            path.exists() for path in files.paths(signature)
        ):  # kernels that are called share the turn
            return compile_(signature)
        try:
            folder = _folders()[-1]
            folder.mkdir(exist_ok=True, parents=True)
            file = opened.enter_context((folder / "lock").open("wb"))
            lock_file(file.fileno(), PATIENCE)
        except OSError as error:
            _warn(f"this process compiles kernels without waiting for others ({error})")
        _compiling = True
        try:
            return compile_(signature)
        finally:
            _compiling = False


@functools.cache
def _warn(text: str) -> None:
    logger.warning("dshuffle: %s", text)


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at an address, which may be invalid."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        ir: Any = cgutils.ir  # type: ignore[attr-defined]
        number, line = ir.IntType(32), builder.inttoptr(args[0], cgutils.voidptr_t)
        of_type = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, of_type, "llvm.prefetch.p0")
        builder.call(function, [line, number(0), number(3), number(1)])  # read access, all cache levels, data cache
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


def declare(kernel_type: type) -> None:
    """Let kernels call other kernels, which are objects of this type."""
    resolve = cpu_target.typing_context.resolve_value_type
    typeof_impl.register(kernel_type)(lambda kernel, context: resolve(kernel.dispatcher))
