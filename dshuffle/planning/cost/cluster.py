"""Description of a cluster for the cost model: the rate of each part, and which workers share it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Real

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.types import Amounts

Rate = float | tuple[float, ...]
"""Rate in bytes/s: one for all workers, or a tuple with one per worker."""
MESSAGE_SECONDS = 1e-3
"""Processor time per message during an exchange. A message sent alone takes longer, as it has to wake a process up."""


@dataclass(frozen=True, slots=True)
class ClusterRates:
    """Rates of a cluster, in bytes/s unless stated otherwise.

    Links are full duplex. The network between them can carry the traffic of all links at once.

    Parameters
    ----------
    n_workers
        Number of workers that train.
    link_up, link_down
        Rates out of and into a worker: one rate for all, or one per worker.
    server_up
        Rate out of the server. None if there is no dedicated server, so that the first worker also serves.
    storage
        Rate of the storage for all workers together; may be infinite. None if the samples cannot be read again.
    storage_client
        Rate of the storage for a single worker. None if only the other rates limit it.
    storage_connection
        Rate of one request after its first byte. None if only the other rates limit it.
    storage_requests
        Requests per second that the storage answers, for all workers together.
    request_seconds
        Time from a request to its first byte.
    requests_at_once
        Number of requests that a worker keeps open.
    storage_over_links
        Whether workers read from the storage over their links, as with any shared storage.
    cores
        Number of processors per machine.
    machine_workers
        Number of workers per machine (consecutive ranks), which share its processors.
    server_on_machine
        Whether the server also uses the processors of the first machine.
    send_rate, receive_rate
        Rate at which one processor gathers, packs and sends rows, and at which it receives, verifies and unpacks them.
    encode_rate, decode_rate
        Rate, in bytes of rows read, at which one processor encodes packets, and at which it decodes them.
    read_rate
        Rate at which one processor fetches and decodes chunks and copies their rows.
    index_seconds
        Processor time per sample that a worker holds, for the next index of its partition and the digests that it
        votes; 0 if it was not measured.
    message_seconds
        Processor time per message, for sender and receiver together, whatever its length.
    wire_overhead
        Bytes of headers per byte of a message; 0 if the rates were measured without headers.
    epoch_seconds
        Time of an exchange in which no rows move: for the order to begin, what workers prepare, and their votes; 0 if
        it was not measured.
    first_message_seconds
        Time that the first message between two participants adds to an exchange, if a processor handles no other one.
        None if it was not measured: first messages then count like all others.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.

    Notes
    -----
    The default processor rates were measured on a machine that does not also emulate links in software: 65 ms of
    processor time to send and receive 37 MiB, 13.2 GB/s for encoding, 8.4 GB/s for decoding, and 924 MB/s on two cores
    for reading chunks of 256 KiB. The default overhead of 4.6 % is for Ethernet, IP and TCP headers.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, server_up=12.5e6, storage=100e6)
    >>> cluster.scaled("storage", 2).storage
    200000000.0
    """

    n_workers: int
    link_up: Rate
    link_down: Rate
    server_up: float | None = None
    storage: float | None = None
    storage_client: float | None = None
    storage_connection: float | None = None
    storage_requests: float = math.inf
    request_seconds: float = 0.0
    requests_at_once: int = 64
    storage_over_links: bool = True
    cores: int = 1
    machine_workers: int = 1
    server_on_machine: bool = False
    send_rate: float = 1.2e9
    receive_rate: float = 1.2e9
    encode_rate: float = 13.2e9
    decode_rate: float = 8.4e9
    read_rate: float = 450e6
    index_seconds: float = 0.0
    message_seconds: float = MESSAGE_SECONDS
    wire_overhead: float = 0.046
    epoch_seconds: float = 0.0
    first_message_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("n_workers", "requests_at_once", "cores", "machine_workers"):
            as_integer(name, getattr(self, name), 1)
        for name in ("link_up", "link_down"):
            self._check_link(name, getattr(self, name))
        for name in ("server_up", "storage", "storage_client", "storage_connection"):
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name), infinite=name != "server_up")
        for name in ("storage_requests", "send_rate", "receive_rate", "encode_rate", "decode_rate", "read_rate"):
            _check_rate(name, getattr(self, name), infinite=True)
        for name in ("request_seconds", "index_seconds", "message_seconds", "wire_overhead", "epoch_seconds"):
            as_number(name, getattr(self, name), 0.0)
        as_number("first_message_seconds", self.first_message_seconds or 0.0, 0.0)

    def _check_link(self, name: str, value: Rate) -> None:
        if not isinstance(value, tuple):
            _check_rate(name, value)
            return
        if len(value) != self.n_workers:
            raise InvalidParameter.because(
                name, f"it has {len(value)} rates", f"Give one rate, or {self.n_workers} rates, one for each worker."
            )
        for rank, rate in enumerate(value):
            _check_rate(f"{name}[{rank}]", rate)

    def rates(self, name: str) -> Amounts:
        """Return ``link_up`` or ``link_down`` of each worker, ``(n,)`` in bytes/s."""
        return np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), (self.n_workers,))

    @property
    def server_link(self) -> float:
        """Rate out of the server, or out of the first worker if it serves."""
        return float(self.rates("link_up")[0]) if self.server_up is None else self.server_up

    def scaled(self, name: str, factor: float) -> ClusterRates:
        """Return a copy with the rates of one part in :data:`SCALABLE` multiplied by a factor."""
        changes: dict[str, object] = {}
        for field in SCALABLE[name]:
            value = getattr(self, field)
            if isinstance(value, tuple):
                changes[field] = tuple(rate * factor for rate in value)
            elif value is not None:
                changes[field] = value * factor
        if name == "storage":
            changes["request_seconds"] = self.request_seconds / factor
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


SCALABLE = {
    "links": ("link_up", "link_down"),
    "server": ("server_up",),
    "storage": ("storage", "storage_client", "storage_connection", "storage_requests"),
    "processors": ("send_rate", "receive_rate", "encode_rate", "decode_rate", "read_rate"),
}
"""Parts that can be scaled: name -> rates that change together. For storage, latency shrinks as rates grow."""


def as_number(name: str, value: object, least: float) -> float:
    """Return ``value`` as a float, or raise :class:`InvalidParameter` if it is not a finite number >= ``least``."""
    if isinstance(value, Real) and least <= float(value) < math.inf:
        return float(value)
    raise InvalidParameter.of(name, value, f"a finite number >= {least:g}")


def _check_rate(name: str, value: object, *, infinite: bool = False) -> None:
    if not isinstance(value, Real) or not float(value) > 0 or (float(value) == math.inf and not infinite):
        raise InvalidParameter.of(name, value, ("a" if infinite else "a finite") + " rate > 0")
