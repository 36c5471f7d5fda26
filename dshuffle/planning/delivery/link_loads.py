"""What several deliveries put on links, and in how many messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.delivery.demand import Demand
from dshuffle.planning.delivery.loads import Loads
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES
from dshuffle.planning.pacing import Pacing
from dshuffle.planning.packets import SERVER, Packets
from dshuffle.planning.types import Amounts, Ranks


def across_racks(sizes: NDArray[np.int64], each: float) -> dict[str, Amounts]:
    """Return bytes out of and into each rack if each worker sends ``each`` bytes, equally to all others."""
    n = int(sizes.sum())
    outside = each * sizes * ((n - sizes) / max(1, n - 1))
    return {"rack_out": outside, "rack_in": outside}


def loads_from_server(demand: Demand, sent: float) -> dict[str, Any]:
    """Return the loads of links if the server sends ``sent`` rows, and workers send each other the rest."""
    n, row, sizes = demand.n_workers, demand.wire_nbytes, demand.rack_sizes
    passed_on = (demand.needed - sent) / n * row
    relayed = across_racks(sizes, passed_on)
    return {
        "server_out": sent * row,
        "worker_in": demand.shares * row,
        "worker_out": passed_on + np.zeros(n),
        "rack_out": relayed["rack_out"],
        "rack_in": relayed["rack_in"] + sizes * (sent / n * row),  # the server is outside all racks
    }


def loads_of_hops(
    demand: Demand, senders: Ranks, destinations: Ranks, row: float, *, sent: float | None = None
) -> dict[str, Any]:
    """Count the loads of links in the hops of a plan.

    Parameters
    ----------
    senders, destinations
        ``(m,)`` ends of each hop.
    row
        Bytes that a hop stands for.
    sent
        Hops from the server in the job, if it is not as many as in the plan. Workers send what the server does not.
    """
    n, racks = demand.n_workers, demand.racks
    served = int(np.count_nonzero(senders == SERVER))
    sent = float(served) if sent is None else sent
    away = np.bincount(senders[senders >= 0], minlength=n).astype(np.float64)
    factor = (len(destinations) - sent) / away.sum() if away.any() else 0.0
    each = sent / max(1, served)
    crossing = {}
    for name, ends in (("rack_out", senders), ("rack_in", destinations)):
        # The server is outside all racks, so its traffic only enters racks.
        between = (senders < 0) | (racks[np.maximum(senders, 0)] != racks[destinations])
        mine = between & (ends >= 0)
        weights = np.where(senders[mine] < 0, each, factor)
        crossing[name] = np.bincount(racks[ends[mine]], weights, minlength=demand.n_racks) * row
    received = np.bincount(destinations, minlength=n).astype(np.float64)
    return {
        "server_out": sent * row,
        "worker_in": received * row,
        "worker_out": away * (factor * row),
        **crossing,
    }


def loads_of_one_hop(demand: Demand, plan: Packets, n_planned: int) -> Loads:
    """Count the loads of a plan whose packets go from their senders to their destinations."""
    growth = demand.growth(n_planned)
    links = loads_of_hops(demand, plan.senders, plan.destinations, demand.wire_nbytes * growth)
    return dataclasses.replace(demand.no_loads(exact=True, packets=plan.n_packets * growth), **links)


def messages_of_rows(loads: Loads, row_nbytes: int, n_flows: int, rate: float) -> float:
    """Estimate the number of messages if rows go in as few as possible.

    Parameters
    ----------
    n_flows
        Pairs of participants that send to each other.
    rate
        Rate of the links in bytes per second; infinite for full messages.
    """
    rows = loads.rows_received(row_nbytes)
    longest = Pacing.of(rate, message_bytes=MESSAGE_BYTES, window_bytes=WINDOW_BYTES).message_nbytes
    full = max(1, longest // row_nbytes)
    return min(rows, float(n_flows * max(1, math.ceil(round(rows / n_flows) / full))))
