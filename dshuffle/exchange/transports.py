"""The transports by name."""

from __future__ import annotations

from dshuffle.exchange.bundle_transport import BundleTransport
from dshuffle.exchange.packet_transport import PacketTransport
from dshuffle.exchange.row_transport import RowTransport
from dshuffle.exchange.transport import Transport
from dshuffle.planning import get_delivery

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (RowTransport, PacketTransport, BundleTransport)
}
"""Every transport by name. Deliveries name the one that they need."""


def transport_of(delivery: str) -> type[Transport]:
    """The transport of a delivery.

    Examples
    --------
    >>> transport_of("clique").name
    'packets'
    """
    return TRANSPORTS[get_delivery(delivery).transport]
