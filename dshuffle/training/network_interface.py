"""Network interfaces of a worker's host."""

from __future__ import annotations

import socket

import psutil


def interface_of(host: str) -> str | None:
    """Return the interface with the host's address. By default gloo uses that of the host name, if it resolves."""
    address = socket.getaddrinfo(host, None)[0][4][0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(entry.address == address for entry in addresses)), None)
