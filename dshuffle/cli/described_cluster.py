"""Rates of a cluster that the options of ``dshuffle advise`` describe."""

from __future__ import annotations

import math

from dshuffle.cli.profiles import Profile
from dshuffle.planning.cost import ClusterRates
from dshuffle.units import parse_rate

HEADERS = 1.046
"""Bytes on the link per byte of payload, for TCP over Ethernet with packets of 1,500 bytes."""


def described_cluster(
    profile: Profile | None,
    *,
    workers: int,
    bandwidth: str | None,
    server_bandwidth: str | None,
    storage_bandwidth: str | None,
    storage_client_bandwidth: str | None,
    request_seconds: float | None,
    local_storage: bool,
    rack_workers: int | None,
    oversubscription: float,
    cores: int,
    machine_workers: int,
) -> ClusterRates:
    """Return the rates of the profile. Options override them. Without a profile, there must be a bandwidth."""
    rates = {} if profile is None else profile.rates

    def link(option: str, text: str | None, key: str) -> float | None:
        return rates.get(key) if text is None else parse_rate(option, text) / HEADERS

    def rate(option: str, text: str | None, key: str) -> float | None:
        return rates.get(key) if text is None else parse_rate(option, text)

    up = link("bandwidth", bandwidth, "link_up_bytes_per_second")
    down = link("bandwidth", bandwidth, "link_down_bytes_per_second")
    assert up is not None
    assert down is not None
    return ClusterRates(
        n_workers=workers,
        link_up=up,
        link_down=down,
        server_up=link("server-bandwidth", server_bandwidth, "server_up_bytes_per_second"),
        storage=rate("storage-bandwidth", storage_bandwidth, "storage_bytes_per_second"),
        storage_client=rate("storage-client-bandwidth", storage_client_bandwidth, "storage_client_bytes_per_second"),
        storage_connection=rates.get("storage_connection_bytes_per_second"),
        storage_requests=rates.get("storage_requests_per_second", math.inf),
        request_seconds=rates.get("storage_request_seconds", 0.0) if request_seconds is None else request_seconds,
        storage_over_links=not local_storage,
        rack_workers=rack_workers,
        oversubscription=oversubscription,
        cores=cores,
        machine_workers=machine_workers,
        wire_overhead=0.0,
    )
