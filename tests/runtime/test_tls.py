"""Sessions over TLS: every kind works, and a process without a certificate gets nothing."""

from __future__ import annotations

import asyncio
import importlib

import pytest
from distributed import Client, Scheduler, Security, SpecCluster, Worker
from distributed.core import connect

from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter

from .conftest import HTTP

pytest.importorskip("cryptography")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def encrypted():
    """Three workers that accept TLS only."""
    security = Security.temporary()
    common = {"host": "127.0.0.1", "protocol": "tls", "security": security}
    options = {**common, "nthreads": 1, "dashboard": False, "memory_limit": 0}
    workers = {name: {"cls": Worker, "options": options} for name in "012"}
    scheduler = {"cls": Scheduler, "options": {**common, "port": 0, **HTTP}}
    with (
        SpecCluster(workers=workers, scheduler=scheduler, security=security) as cluster,
        Client(cluster, security=security) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "way",
    [
        {"delivery": "peer"},
        {"delivery": "storage"},
        {"delivery": "server"},
        {"delivery": "clique", "cache_fraction": 0.6},
        {"delivery": "leftover", "assignment": "aligned", "relay": "ring"},
    ],
    ids=lambda way: way["delivery"],
)
def test_sessions_of_every_kind(encrypted, small, check_orders, way):
    with Shuffler(encrypted, small, **way) as shuffler:
        assert all(address.startswith("tls://") for address in shuffler.addresses)
        check_orders(shuffler, 3)
        [epoch] = shuffler.epochs(1)
        assert epoch.together(lambda partition, group: float(group.mean(1.0))) == [1.0] * 3


@pytest.mark.parametrize("protocol", ["tcp", "tls"])
def test_without_a_certificate_nobody_gets_rows(encrypted, small, protocol):
    """Neither over plain TCP nor with a certificate of another authority."""
    stranger = Security.temporary() if protocol == "tls" else Security()

    async def ask(address):
        comm = await connect(address, timeout="3s", **stranger.get_connection_args("client"))
        try:
            await comm.write({"op": "dshuffle_fetch", "session_id": "?", "message": (1, 0, 1, 0), "acknowledged": []})
            return await comm.read()
        finally:
            comm.abort()

    with Shuffler(encrypted, small) as shuffler:
        address = shuffler.addresses[0].replace("tls://", f"{protocol}://")
        with pytest.raises((OSError, TimeoutError)):
            asyncio.run(asyncio.wait_for(ask(address), 10))


def test_ddp_is_refused(torch, encrypted, small):
    torch_ddp = importlib.import_module("dshuffle.training.torch_ddp")
    with (
        Shuffler(encrypted, small) as shuffler,
        pytest.raises(InvalidParameter, match="this cluster uses TLS, but PyTorch's gloo"),
    ):
        torch_ddp.fit_torch_ddp(shuffler, lambda: None, lambda parameters: None, epochs=1, batch_size=1)
