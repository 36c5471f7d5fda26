"""When bytes last came from another worker, also those of a message of which only a part is here.

A message may take minutes on a slow link. The kernel knows of every packet, and Dask only of whole messages.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from distributed import Worker

_INFO = struct.Struct("=52xI")
"""Linux's ``struct tcp_info`` up to ``tcpi_last_data_recv``: milliseconds since data came."""


def seconds_since_data(worker: Worker, address: str) -> float | None:
    """Seconds since bytes came from an address over a connection on which this worker waits for an answer.

    Returns
    -------
    float or None
        None if it waits for none, or if the system does not say.
    """
    ages = [_age(comm) for comm in worker.rpc.occupied.get(address, ())]
    return min((age for age in ages if age is not None), default=None)


def _age(comm: Any) -> float | None:
    connection = getattr(getattr(comm, "stream", None), "socket", None)  # of TCP and TLS, until it is closed
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # it has just been closed
        return None
    return float(_INFO.unpack(information)[0]) / 1000 if len(information) == _INFO.size else None
