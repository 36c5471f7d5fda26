"""Errors that may pass are asked again, a bounded number of times and for a bounded time; others are not."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.storage import LocalStore

from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store import create_dataset, open_dataset, patient_store
from dshuffle.store.patient_store import explained, is_transient

X = np.arange(600.0).reshape(100, 6)


class StatusError(Exception):
    """As aiohttp and what is built on it raise."""

    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    "exc",
    [
        *(TimeoutError(), ConnectionResetError(), StatusError(503), StatusError(429)),
        *(OSError(code, "") for code in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTUNREACH)),
    ],
)
def test_what_may_pass(exc: Exception) -> None:
    assert is_transient(exc)


@pytest.mark.parametrize(
    "exc",
    [
        *(StatusError(403), StatusError(404), ValueError("x"), MemoryError(), OSError("no number")),
        *(OSError(code, "") for code in (errno.EACCES, errno.ENOENT, errno.ENOSPC, errno.EROFS, errno.EINVAL)),
    ],
)
def test_what_may_not(exc: Exception) -> None:
    assert not is_transient(exc)


def test_secrets_are_taken_out_of_errors() -> None:
    said = explained(ValueError("hunter2 is no hunter22"), ["hunter2", "hunter22", "", "no"])
    assert said == "ValueError: *** is no ***"


def failing(monkeypatch: Any, times: int, error: Exception | None, delay: float = 0.0) -> list[str]:
    """Let the first reads of chunk 3 fail."""
    read, failed = patient_store._read, []

    def broken(path: str) -> Any:
        if path.endswith("x/c/3/0") and len(failed) < times:
            failed.append(path)
            time.sleep(delay)
            if error is not None:
                raise error
        return read(path)

    monkeypatch.setattr(patient_store, "_read", broken)
    return failed


def test_a_file_system_that_recovers(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    failed = failing(monkeypatch, 3, OSError(errno.ESTALE, "Stale file handle"))
    np.testing.assert_array_equal(dataset.read_rows(np.arange(100))["x"], X)
    assert len(failed) == dataset.traffic.retries == 3
    assert dataset.traffic.requests == 10


def test_it_gives_up_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    dataset = open_dataset(tmp_path / "d", storage_options={"max_retries": 2})
    failed = failing(monkeypatch, 99, OSError(errno.EIO, "Input/output error"))
    words = rf"cannot fetch x/c/3/0 of {tmp_path}/d: OSError: .*Input/output error; tried 3 times in \d"
    with pytest.raises(DatasetError, match=words) as caught:
        dataset.read_rows([30])
    assert type(caught.value) is DatasetError
    assert len(failed) == 3


def test_no_permission_is_not_asked_again(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    failed = failing(monkeypatch, 99, PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(DatasetError, match=r"cannot fetch x/c/3/0 .*Permission denied$"):
        dataset.read_rows([30])
    assert len(failed) == 1


def test_a_file_system_that_hangs(tmp_path: Path, monkeypatch: Any) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    dataset = open_dataset(tmp_path / "d", storage_options={"timeout": 0.2, "max_retries": 50})
    failing(monkeypatch, 4, None, delay=1.5)
    started = time.monotonic()
    with pytest.raises(DatasetError, match=r"cannot fetch x/c/3/0 .*no answer within 0.2 s; tried [23] times"):
        dataset.read_rows([30])
    assert time.monotonic() - started < 5
    np.testing.assert_array_equal(dataset.read_rows(np.arange(30))["x"], X[:30])


@pytest.mark.parametrize("change", [-5, 5])
def test_a_range_of_the_wrong_length(tmp_path: Path, monkeypatch: Any, change: int) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=50)
    read = LocalStore.get

    async def wrong(self: Any, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        data = await read(self, key, prototype, byte_range)
        if hasattr(byte_range, "end"):  # not the index
            data = data[:change] if change < 0 else data + data[:change]
        return data

    monkeypatch.setattr(LocalStore, "get", wrong)
    with pytest.raises(CorruptChunk, match=r"244 bytes of x/c/0/0 was answered with \d+; .*wrongly"):
        dataset.read_rows([7])
