"""What cutting an exchange into messages costs: processor time for each, and what relays hand on last."""

from __future__ import annotations

import math

from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads
from dshuffle.planning.cost.work import Work
from dshuffle.planning.relay import batch_sizes, packets_per_batch

MESSAGE_BYTES = 2**23
"""A full message of rows, if no setting says otherwise."""


def message_count(work: Work, n_workers: int, loads: Loads) -> float:
    """Messages that cross the network, between all participants.

    A flow of rows is cut into as few as possible, one of packets into batches. A relay hands each batch on in one
    message to each of the others; in a ring a worker has one for each of the others in every round but the last.
    """
    n, entering = n_workers, float(loads.worker_in.sum())
    if not entering:
        return 0.0
    if not work.coded:
        flows = n * (n - 1) if work.delivery == "peer" else n
        return float(flows * math.ceil(entering / flows / MESSAGE_BYTES))
    packets = round(loads.packets)
    if work.relay == "pipelined":
        return float(n * n * len(batch_sizes(packets, n, work.row_nbytes)))
    batches = entering / (work.row_nbytes + CHECKSUM_NBYTES) / packets_per_batch(packets, n, work.row_nbytes)
    if work.relay == "unicast":
        return n * max(1.0, batches / n)
    rounds = entering / loads.server_out - 1
    return n * (1 + (n - 1) * rounds) + batches


def last_seconds(work: Work, cluster: Cluster, loads: Loads) -> float:
    """What relays still send when the last packets have left the server: much of all, if there are few packets."""
    if not work.coded or work.relay != "pipelined" or loads.packets < 1:
        return 0.0
    sizes = batch_sizes(round(loads.packets), cluster.n_workers, work.row_nbytes)
    busiest = float((loads.worker_out / cluster.rates("link_up")).max()) * (1 + cluster.wire_overhead)
    return busiest * sizes[-1] / sum(sizes)
