"""The interface of a worker's address."""

from __future__ import annotations

import psutil

from dshuffle.training.network_interface import interface_of


def test_the_interface_has_the_address() -> None:
    name = interface_of("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in {one.address for one in psutil.net_if_addrs()[name]}


def test_an_address_of_another_host_has_none() -> None:
    assert interface_of("192.0.2.77") is None
