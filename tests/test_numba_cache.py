"""Kernels come from numba's cache on disk only if their label is that of this function, version and signature."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from dshuffle import numba_cache
from dshuffle.kernels import Kernel, kernel
from dshuffle.numba_cache import LabelledFiles

KERNELS = """
import sys
import numpy as np
from dshuffle.kernels import kernel
from called import tripled

@kernel()
def total(numbers):
    result = 0
    for number in numbers:
        result += tripled(number)
    return result

print(total(np.arange(4)), sum(total.stats.cache_hits.values()))
"""
CALLED = """
from dshuffle.kernels import kernel
FACTOR = {factor}

@kernel()
def tripled(number):
    return FACTOR * number
"""


def ran(folder: Path, factor: int = 3) -> tuple[int, int]:
    """Result of the kernel in a new process, and how often it came from the cache."""
    if not (folder / "kernels.py").exists():  # older versions of numba look at the time of the file
        (folder / "kernels.py").write_text(KERNELS)
    (folder / "called.py").write_text(CALLED.format(factor=factor))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "kernels.py"]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    total, hits = process.stdout.split()
    return int(total), int(hits)


def damage(folder: Path, pattern: str, content: bytes) -> None:
    paths = list(folder.glob(f"cache/*/{pattern}"))
    assert paths
    for path in paths:
        path.write_bytes(content)


@pytest.mark.slow
def test_a_changed_function_of_another_file_is_compiled_again(tmp_path):
    assert ran(tmp_path) == (18, 0)
    assert ran(tmp_path) == (18, 1)
    assert ran(tmp_path, factor=5) == (30, 0)  # plain numba: 18
    assert ran(tmp_path, factor=5) == (30, 1)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x05", b"cnumba.core.types.no_such_module\nname\n."],
    ids=["empty", "cut short", "of another version"],
)
def test_what_cannot_be_read_is_compiled_again(tmp_path, pattern, content):
    assert ran(tmp_path) == (18, 0)
    damage(tmp_path, pattern, content)
    assert ran(tmp_path) == (18, 0)
    assert ran(tmp_path) == (18, 1)


def files(folder: Path, stamp: str = "now", version: str = "0.99") -> LabelledFiles:
    made = LabelledFiles(str(folder), "f", stamp)
    made._version = version
    return made


def test_code_is_loaded_by_its_version_stamp_and_signature(tmp_path):
    files(tmp_path).save(("int64",), "code")
    files(tmp_path).save(("float64",), "other code")
    assert files(tmp_path).load(("int64",)) == "code"
    assert files(tmp_path).load(("float64",)) == "other code"
    assert files(tmp_path).load(("int32",)) is None
    assert files(tmp_path, stamp="earlier").load(("int64",)) is None
    assert files(tmp_path, version="0.98").load(("int64",)) is None


@pytest.mark.parametrize("change", [{"stamp": "earlier"}, {"version": "0.98"}])
def test_an_index_whose_code_is_not_there_yet_does_not_lead_to_older_code(tmp_path, monkeypatch, change):
    """Numba writes the index first. Another process looks in between."""
    files(tmp_path, **change).save(("int64",), "older code")
    between = []
    save_data = IndexDataCacheFile._save_data

    def look_and_save(self, name, data):
        between.append(files(tmp_path).load(("int64",)))
        save_data(self, name, data)

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", look_and_save)
    files(tmp_path).save(("int64",), "code")
    assert between == [None]
    assert files(tmp_path).load(("int64",)) == "code"


def test_two_processes_that_choose_the_same_name_do_not_swap_their_code(tmp_path, monkeypatch):
    load_index = IndexDataCacheFile._load_index
    first, second = files(tmp_path), files(tmp_path)
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})  # both have looked before either has saved
    first.save(("avx2",), "code for one processor")
    second.save(("avx512",), "code for another")
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", load_index)
    assert files(tmp_path).load(("avx512",)) == "code for another"
    assert files(tmp_path).load(("avx2",)) is None
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", lambda self: {("avx2",): "f.1.nbc"})
    assert files(tmp_path).load(("avx2",)) is None


FACTOR = 2


@kernel(cache=False)
def product(number):
    return FACTOR * number


@kernel(cache=False)
def later(number):
    return product(number) + sum([0.5 for _ in range(2)])


def stamp(function: object) -> str:
    assert isinstance(function, Kernel)
    return function.stamp()


def test_a_stamp_covers_constants_global_numbers_and_what_is_called(monkeypatch):
    names = later.__wrapped__.__globals__
    earlier = stamp(later)
    assert earlier == stamp(later) != stamp(product)
    monkeypatch.setitem(names, "FACTOR", np.uint64(2))
    changed = stamp(later)
    monkeypatch.setitem(names, "FACTOR", 2)
    assert stamp(later) == earlier != changed
    monkeypatch.setitem(names, "product", kernel(cache=False)(lambda number: FACTOR + number))
    assert stamp(later) != earlier


STAMPS = """
import importlib, json, sys
from dshuffle.kernels import Kernel
names = ["coding", "rows", "exchange.row_file", "planning.bijection", "planning.delivery.clique_packing"]
modules = [importlib.import_module(f"dshuffle.{name}") for name in names]
kernels = {f"{module.__name__}.{name}": kernel for module in modules for name, kernel in vars(module).items()}
print(json.dumps({name: kernel.stamp() for name, kernel in kernels.items() if isinstance(kernel, Kernel)}))
"""


def test_stamps_do_not_depend_on_the_process():
    stamps = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", STAMPS]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        stamps.append(json.loads(ran.stdout))
    assert stamps[0] == stamps[1]
    assert len(set(stamps[0].values())) > 20


def test_options_and_inner_functions_count():
    plain, inlined = (kernel(cache=False, **options)(product.__wrapped__) for options in ({}, {"inline": "always"}))
    assert plain.stamp() != inlined.stamp()
    first, second = (
        kernel(cache=False)(namespace["function"])
        for namespace in (
            run_code("FACTOR = 2\ndef function(n):\n    return [FACTOR * k for k in range(n)]"),
            run_code("FACTOR = 3\ndef function(n):\n    return [FACTOR * k for k in range(n)]"),
        )
    )
    assert first.stamp() != second.stamp()


def run_code(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


UNWRITABLE = """
from numba.core import caching

def refuse(self):
    raise PermissionError(13, "Permission denied")

in_tree = getattr(caching, "InTreeCacheLocator", None) or caching._InTreeCacheLocator
{0}.ensure_cache_path = refuse
"""


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["in_tree", "caching._CacheLocator"], ids=["beside the module", "anywhere"])
def test_a_user_who_cannot_write_loads_what_the_owner_has_compiled(tmp_path, refused):
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "called.py").write_text(CALLED.format(factor=3))
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "home")}

    def run(code: str) -> list[str]:
        command = [sys.executable, "-c", f"{code}\nimport kernels"]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.split()

    assert run("") == ["18", "0"]
    shutil.rmtree(tmp_path / "home", ignore_errors=True)
    assert run(UNWRITABLE.format(refused)) == ["18", "1"]


def test_code_that_cannot_be_saved_is_used(monkeypatch, caplog):
    """The disk is full. That is said once, not for each kernel and signature."""

    @kernel()
    def one_more(number):
        return number + 1

    def full(self, name, data):
        raise OSError(28, "No space left on device", f"{name}.tmp.{next(numbers)}")

    numbers = itertools.count()
    numba_cache._warn_of_unsaved_code.cache_clear()
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    assert [one_more(number) for number in (1, 1.5, True)] == [2, 2.5, 2]
    assert caplog.text.count("compiled kernels cannot be kept in") == 1
    assert "(No space left on device)" in caplog.text
