"""``server``: one worker that can read every sample sends each needed sample to its worker."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from dshuffle.planning.delivery.definition import (
    Delivery,
    Demand,
    Loads,
    PlanInput,
    loads_of_one_hop,
    messages_of_rows,
)
from dshuffle.planning.delivery.peer import PEER
from dshuffle.planning.epoch_plan import SERVER, Packets


def plan_server(plan_input: PlanInput) -> Packets:
    """Plan one packet from the server for every needed sample, by ascending sample.

    In this order, a server whose memory is smaller than the dataset streams through the store once.

    References
    ----------
    The uncoded baseline of Chung et al. (2017) and Attia and Tandon (2016); see docs/papers.md.
    """
    samples = plan_input.missing_samples()
    return Packets.uncoded(samples, plan_input.destinations[samples], np.full(len(samples), SERVER))


class RowsFromServer(Delivery):
    """Deliveries of single rows that one worker sends to all others."""

    name = "server"
    plan = staticmethod(plan_server)
    needs_server: ClassVar[bool] = True
    demands: ClassVar[int] = 2
    shows_link_rates: ClassVar[bool] = False

    @property
    def without_server(self) -> str:
        """Peers, which need nothing but the workers that train."""
        return PEER.name

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Every packet takes one hop."""
        return loads_of_one_hop(demand, plan)

    def pair_count(self, n_workers: int, relay: str) -> int:
        """The server sends to every worker."""
        return n_workers

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Messages are full."""
        return messages_of_rows(loads, row_nbytes, self.pair_count(len(loads.worker_in), relay), math.inf)


SERVER_ROWS = RowsFromServer()
