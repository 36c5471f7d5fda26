"""What the cost model has to know of a cluster: how fast each part is, and who shares it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

Rate = float | tuple[float, ...]
"""Bytes a second: the same for all workers, or one for each."""
Amounts = NDArray[np.float64]
MESSAGE_SECONDS = 1e-3
"""What a message takes of a processor in an exchange. Alone it takes longer, as nothing else wakes a process up."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The rates of a cluster. All are in bytes a second unless it says otherwise.

    Links are full duplex, and what connects them carries all of them at once unless racks say otherwise.

    Parameters
    ----------
    n_workers
        Workers that train.
    link_up, link_down
        What leaves, and what enters, a worker: one rate, or one for each worker.
    server_up
        What leaves the server; None if there is no server of its own, so that the first worker serves beside training.
    storage
        What the storage gives to all workers together, perhaps infinite; None if the samples cannot be read again.
    storage_client
        What the storage gives to one worker alone; None for whatever the other rates allow.
    storage_connection
        What one request reaches once its first byte has come; None for whatever the other rates allow.
    storage_requests
        Requests a second that the storage answers, of all workers together.
    request_seconds
        From the request for one object to its first byte.
    requests_at_once
        Requests that a worker keeps open.
    storage_over_links
        Whether what a worker reads comes over its link, as it does from any shared storage.
    rack_workers
        Workers of a rack (consecutive ranks), whose traffic with others goes through one uplink; None for no racks.
    oversubscription
        How many times the links of a rack exceed its uplink, which carries so much each way.
    cores
        Processors of a machine.
    machine_workers
        Workers (consecutive ranks) that share a machine's processors.
    server_on_machine
        Whether the server shares the first machine's processors too.
    send_rate, receive_rate
        Bytes a second that one processor gathers, packs and sends, or receives, verifies and unpacks.
    encode_rate, decode_rate
        Bytes of rows a second that one processor XORs into packets, or reads to take a row out of a packet.
    read_rate
        Bytes of chunks a second that one processor fetches, decodes and scatters.
    message_seconds
        What a message takes of one processor, at both of its ends together, whatever its length.
    wire_overhead
        Bytes of headers on a wire for each byte of a message; 0 if the rates were measured without them.
    epoch_seconds
        What an epoch's exchange takes however few bytes it moves: votes, the commit, the first message's way.

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    Notes
    -----
    The defaults for processors are those of docs/design.md, "Measured", on a machine whose cores are not shared by
    links emulated in software: 65 ms of processor time to send and to receive 37 MiB, encoding 13.2 and decoding
    8.4 GB/s, reading chunks of 256 KiB 924 MB/s on two cores. 4.6 % are the headers of Ethernet, IP and TCP.

    Examples
    --------
    >>> cluster = Cluster(8, link_up=12.5e6, link_down=12.5e6, server_up=12.5e6, storage=100e6)
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
    rack_workers: int | None = None
    oversubscription: float = 1.0
    cores: int = 1
    machine_workers: int = 1
    server_on_machine: bool = False
    send_rate: float = 1.2e9
    receive_rate: float = 1.2e9
    encode_rate: float = 13.2e9
    decode_rate: float = 8.4e9
    read_rate: float = 450e6
    message_seconds: float = MESSAGE_SECONDS
    wire_overhead: float = 0.046
    epoch_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_workers", "requests_at_once", "cores", "machine_workers"):
            as_integer(name, getattr(self, name), 1)
        if self.rack_workers is not None:
            as_integer("rack_workers", self.rack_workers, 1)
        for name in ("link_up", "link_down"):
            self._check_link(name, getattr(self, name))
        for name in ("server_up", "storage", "storage_client", "storage_connection"):
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name), infinite=name != "server_up")
        for name in ("storage_requests", "send_rate", "receive_rate", "encode_rate", "decode_rate", "read_rate"):
            _check_rate(name, getattr(self, name), infinite=True)
        for name in ("request_seconds", "message_seconds", "wire_overhead", "epoch_seconds"):
            as_number(name, getattr(self, name), 0.0)
        as_number("oversubscription", self.oversubscription, 1.0)

    def _check_link(self, name: str, value: Rate) -> None:
        if not isinstance(value, tuple):
            _check_rate(name, value)
            return
        if len(value) != self.n_workers:
            raise InvalidParameter.of(
                name, f"{len(value)} rates", f"one rate, or {self.n_workers}, one for each worker"
            )
        for rank, rate in enumerate(value):
            _check_rate(f"{name}[{rank}]", rate)

    def rates(self, name: str) -> Amounts:
        """``(n,)`` bytes a second of ``link_up`` or ``link_down``, worker by worker."""
        return np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), (self.n_workers,))

    @property
    def n_racks(self) -> int:
        """Racks; one if there are none."""
        return 1 if self.rack_workers is None else -(-self.n_workers // self.rack_workers)

    def racks(self) -> NDArray[np.int64]:
        """``(n,)`` the rack of each worker."""
        return np.arange(self.n_workers) // (self.rack_workers or self.n_workers)

    @property
    def server_link(self) -> float:
        """What leaves the worker that serves."""
        return float(self.rates("link_up")[0]) if self.server_up is None else self.server_up

    def scaled(self, name: str, factor: float) -> Cluster:
        """The cluster with one of :data:`SCALABLE` rates times a factor."""
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
"""What one may buy more of: name -> rates that grow together. Faster storage also answers requests sooner."""


def as_number(name: str, value: object, least: float) -> float:
    """A finite number of at least ``least``, or :class:`InvalidParameter`."""
    if isinstance(value, Real) and least <= float(value) < math.inf:
        return float(value)
    raise InvalidParameter.of(name, value, f"a finite number of at least {least:g}")


def _check_rate(name: str, value: object, *, infinite: bool = False) -> None:
    if not isinstance(value, Real) or not float(value) > 0 or (float(value) == math.inf and not infinite):
        raise InvalidParameter.of(name, value, "a rate above 0" + ("" if infinite else " and finite"))
