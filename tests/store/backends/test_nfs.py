"""NFS in user space, against nfs-ganesha in a network namespace of its own."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, verify_dataset
from dshuffle.store.backends import nfs

X = np.arange(600.0).reshape(100, 6)
IDS = np.array([99, 3, 3, 50, 0])
SERVER, CLIENT = "10.91.209.2", "10.91.209.1"
CONFIG = """
NFS_CORE_PARAM { Protocols = 3; Bind_addr = %(server)s; MNT_Port = 20048; Enable_NLM = false; Enable_RQUOTA = false; }
EXPORT { Export_Id = 1; Path = %(folder)s/open; Pseudo = /open; Access_Type = RW; Squash = No_Root_Squash;
  Protocols = 3; Transports = TCP; SecType = sys; FSAL { Name = VFS; } }
EXPORT { Export_Id = 2; Path = %(folder)s/read-only; Pseudo = /read-only; Access_Type = RO; Squash = No_Root_Squash;
  Protocols = 3; Transports = TCP; SecType = sys; FSAL { Name = VFS; } }
LOG { Default_Log_Level = FATAL; }
"""


@dataclass
class Export:
    """Where the exports are, on either side."""

    folder: Path
    pid: int

    def url(self, path: str) -> str:
        return f"nfs://{SERVER}{self.folder}/{path}"


def why_not() -> str:
    missing = [name for name in ("ganesha.nfsd", "rpcbind", "ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: nfs-ganesha-vfs, rpcbind, iproute2, util-linux)"
    if os.geteuid() != 0:
        return "a network namespace for the server needs root"
    try:
        nfs._library()
    except DatasetError as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Export]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("nfs")
    (folder / "open").mkdir()
    (folder / "read-only").mkdir()
    (folder / "ganesha.conf").write_text(CONFIG % {"server": SERVER, "folder": folder})
    space = f"dsn{os.getpid()}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        ip("netns", "add", space)
        ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
    except subprocess.CalledProcessError as exc:
        subprocess.run(["ip", "netns", "del", space], capture_output=True)
        pytest.skip(f"no network namespaces here: {exc.stderr.decode()}")
    server = None
    try:
        ip("addr", "add", f"{CLIENT}/24", "dev", space)
        ip("link", "set", space, "up")
        ip("-n", space, "addr", "add", f"{SERVER}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        # A /run of their own, where rpcbind has its socket.
        script = (
            "mount -t tmpfs tmpfs /run; mkdir -p /run/ganesha; rpcbind -f -w & sleep 0.3; "
            f"exec ganesha.nfsd -F -f {folder}/ganesha.conf -L {folder}/ganesha.log -p /run/ganesha.pid"
        )
        server = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(200):
            try:
                socket.create_connection((SERVER, 2049), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "ganesha.log").read_text()
                time.sleep(0.1)
        yield Export(folder, server.pid)
    finally:
        if server is not None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        ip("netns", "del", space)


@pytest.mark.parametrize("shard_rows", [pytest.param(None, marks=pytest.mark.slow), 21])
def test_round_trip(export: Export, shard_rows: int | None) -> None:
    name = f"open/deep/{shard_rows}"
    arrays = {"x": X, "y": np.arange(100)}
    made = create_dataset(export.url(name), arrays, chunk_rows=7, shard_rows=shard_rows)
    for dataset in (made, open_dataset(export.folder / name), pickle.loads(pickle.dumps(made))):
        np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    assert verify_dataset(made).bad == ()
    made = create_dataset(export.url(name), {"x": X + 1}, chunk_rows=9, overwrite=True)
    assert list(made.arrays) == ["x"]
    assert sorted(path.name for path in (export.folder / name).iterdir()) == ["x", "zarr.json"]
    np.testing.assert_array_equal(made.read_rows(IDS)["x"], X[IDS] + 1)


def test_large_chunks(export: Export) -> None:
    x = np.random.default_rng(0).integers(0, 256, (3000, 4096), dtype=np.uint8)  # more than the server reads at once
    dataset = create_dataset(export.url("open/large"), {"x": x})
    np.testing.assert_array_equal(dataset.read_rows(np.arange(3000))["x"], x)


def test_what_is_not_there(export: Export) -> None:
    with pytest.raises(DatasetNotFound, match="no dataset exists at nfs://"):
        open_dataset(export.url("open/none"))
    with pytest.raises(DatasetError, match=r"exports neither /nowhere/x nor a folder above.*showmount"):
        open_dataset(f"nfs://{SERVER}/nowhere/x")


def test_no_permission(export: Export) -> None:
    with pytest.raises(
        DatasetError, match=r"cannot (write|delete) .*read-only/x.*(ROFS|ermission|Read-only)"
    ) as caught:
        create_dataset(export.url("read-only/x"), {"x": X})
    assert "tried" not in str(caught.value)


def test_a_server_that_falls_silent(export: Export) -> None:
    create_dataset(export.url("open/silent"), {"x": X}, chunk_rows=10)
    dataset = open_dataset(export.url("open/silent"), storage_options={"timeout": 0.4, "max_retries": 50})
    os.kill(export.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(DatasetError, match=r"cannot fetch x/c/3/0 of nfs://.*open/silent: .*; tried [2-4] times"):
            dataset.read_rows([30])
        assert time.monotonic() - started < 5
    finally:
        os.kill(export.pid, signal.SIGCONT)
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])


@pytest.mark.parametrize(
    "url", ["nfs://server", "nfs://me@server/x", "nfs://server:2049/x", "nfs:///x", "nfs://s/x?version=4"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidParameter, match="url="):
        open_dataset(url)


def test_options_are_refused() -> None:
    with pytest.raises(InvalidParameter, match=r"storage_options=\['uid'\]"):
        open_dataset("nfs://server/x", storage_options={"uid": 3})


def test_without_the_library(monkeypatch: Any) -> None:
    monkeypatch.setattr(nfs, "_LIBRARIES", ("libnothing.so",))
    nfs._library.cache_clear()
    try:
        with pytest.raises(DatasetError, match="apt-get install"):
            open_dataset("nfs://server/x")
    finally:
        nfs._library.cache_clear()


class Counted:
    """In place of a connection: it counts those that are open, and may wait in a call."""

    open = 0
    gate: threading.Event | None = None

    def __init__(self, *_: Any) -> None:
        type(self).open += 1

    def close(self) -> None:
        type(self).open -= 1

    def is_file(self, key: str) -> bool:
        if key == "fails":
            raise OSError("no")
        if self.gate is not None:
            assert self.gate.wait(10)
        return True


def test_connections_are_closed_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfs, "_Connection", Counted)
    monkeypatch.setattr(nfs, "_library", lambda: None)
    monkeypatch.setattr(Counted, "open", 0)
    store = nfs.NfsStore("nfs://server/export", timeout=1)

    async def main() -> None:
        assert all(await asyncio.gather(*(store.exists("there") for _ in range(20))))
        assert 1 <= Counted.open <= 8
        store.close()
        assert Counted.open == 0
        assert await store.exists("there")  # it connects again
        assert Counted.open == 1
        with pytest.raises(OSError, match="no"):
            await store.exists("fails")
        assert Counted.open == 0  # late answers may come on it
        Counted.gate = threading.Event()
        call = asyncio.ensure_future(store.exists("slow"))
        while not Counted.open:
            await asyncio.sleep(0.01)
        store.close()
        assert Counted.open == 1  # it is in use
        Counted.gate.set()
        assert await call
        assert Counted.open == 0
        Counted.gate = None

    asyncio.run(main())
