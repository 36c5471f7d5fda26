"""What cutting an exchange into messages costs: processor time for each, and what relays hand on last."""

from __future__ import annotations

import functools
import math

import numpy as np

from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads
from dshuffle.planning.cost.work import Work
from dshuffle.planning.relay import MESSAGE_BYTES, batch_sizes, packets_per_batch


def message_count(work: Work, n_workers: int, loads: Loads) -> float:
    """Messages that cross the network, between all participants; their cost is laid on the workers alike.

    A flow of rows is cut into as few as possible, one of packets into batches. A relay hands each batch on in one
    message to each of the others; in a ring a worker has one for each of the others in every round but the last.
    """
    n, rows = n_workers, _rows(work, loads)
    if not rows:
        return 0.0
    if not work.coded:
        flows = n * (n - 1) if work.delivery == "peer" else n
        full = max(1, MESSAGE_BYTES // work.row_nbytes)
        return min(rows, float(flows * max(1, math.ceil(round(rows / flows) / full))))
    packets = round(loads.packets)
    if work.relay == "pipelined":
        return min(rows, _in_batches(packets, n, work.row_nbytes, rows)[0])
    batches = rows / packets_per_batch(packets, n, work.row_nbytes)
    if work.relay == "unicast":
        return max(float(min(n, rows)), batches)
    rounds = float(loads.worker_in.sum()) / loads.server_out - 1
    return min(rows, n * (1 + (n - 1) * rounds) + batches)


def last_seconds(work: Work, cluster: Cluster, loads: Loads) -> float:
    """What relays still send when the last packets have left the server: much of all, if there are few packets."""
    if not work.coded or work.relay != "pipelined" or loads.packets < 1:
        return 0.0
    last = _in_batches(round(loads.packets), cluster.n_workers, work.row_nbytes, _rows(work, loads))[1]
    return last * float((loads.worker_out / cluster.rates("link_up")).max()) * (1 + cluster.wire_overhead)


def _rows(work: Work, loads: Loads) -> float:
    """Rows that enter workers."""
    return float(loads.worker_in.sum()) / (work.row_nbytes + CHECKSUM_NBYTES)


@functools.lru_cache(maxsize=256)  # asked again for every rate that might be another
def _in_batches(packets: int, n_workers: int, row_nbytes: int, rows: float) -> tuple[float, float]:
    """Messages of a pipelined relay, and the part of its packets that are in its last batch."""
    n, sizes = n_workers, np.array(batch_sizes(packets, n_workers, row_nbytes))
    # Each of the others wants a packet with this chance, and nobody is sent a message of none.
    wanted = min(1.0, (rows / packets - 1) / max(1, n - 1))
    handed_on = n * (n - 1) * float((1 - (1 - wanted) ** sizes).sum())
    return n * len(sizes) + handed_on, float(sizes[-1] / sizes.sum())
