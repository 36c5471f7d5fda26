"""What several deliveries put on links, and in how many messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from dshuffle.planning.delivery.demand import Demand
from dshuffle.planning.delivery.loads import Loads
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES
from dshuffle.planning.pacing import Pacing
from dshuffle.planning.packets import SERVER, Packets
from dshuffle.planning.types import Ranks


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
    n, served = demand.n_workers, int(np.count_nonzero(senders == SERVER))
    sent = float(served) if sent is None else sent
    away = np.bincount(senders[senders >= 0], minlength=n).astype(np.float64)
    factor = (len(destinations) - sent) / away.sum() if away.any() else 0.0
    received = np.bincount(destinations, minlength=n).astype(np.float64)
    return {"server_out": sent * row, "worker_in": received * row, "worker_out": away * (factor * row)}


def loads_of_one_hop(demand: Demand, plan: Packets) -> Loads:
    """Count the loads of a plan whose packets go from their senders to their destinations."""
    links = loads_of_hops(demand, plan.senders, plan.destinations, demand.wire_nbytes * demand.growth)
    return dataclasses.replace(demand.no_loads(packets=plan.n_packets * demand.growth), **links)


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
