"""Predicted time of an epoch's exchange: the load of each part of a cluster divided by its rate.

Messages add processor time, and relays pass on packets only once their batch has arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads import MOST_SAMPLES, MOST_WORKERS, first_load, loads_of
from dshuffle.planning.delivery.definition import Loads


def message_count(work: Work, loads: Loads, rate: float = math.inf) -> float:
    """Estimate the number of messages between all participants, on links of a rate (bytes per second)."""
    if not loads.worker_in.any():
        return 0.0
    return work.delivery.message_count(loads, work.row_nbytes, work.choices.relay, rate)


def relayed_seconds(work: Work, cluster: ClusterRates, loads: Loads, server_seconds: float) -> float:
    """Seconds until relays have passed on all batches, none of them before it has arrived; 0 without such relays."""
    batches = work.delivery.batches(loads, work.row_nbytes, work.choices.relay)
    if batches is None:
        return 0.0
    wire, served = 1 + cluster.wire_overhead, loads.server_out / cluster.n_workers
    up, down = cluster.rates("link_up"), cluster.rates("link_down")
    pauses = batches.pauses * PAUSE_MESSAGES * (cluster.first_message_seconds or 0.0)
    return pauses + batches.seconds(
        server=server_seconds,
        to_others=float((loads.worker_out / up).max()) * wire,
        from_others=float(((loads.worker_in - served) / down).max()) * wire,
        from_server=float((served / down).max()) * wire,
    )


def ends_seconds(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    """Seconds in which no link is busy: to pack the first message, and to unpack the last one."""
    messages = _messages(work, cluster, loads)
    if not messages:
        return 0.0
    return float(loads.worker_in.sum()) / messages * (1 / cluster.send_rate + 1 / cluster.receive_rate)


def first_messages(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    """Estimate the number of messages that are the first ones from their sender to their receiver."""
    pairs = work.delivery.pair_count(cluster.n_workers, work.choices.relay)
    return min(_messages(work, cluster, loads), float(pairs))


def fixed_seconds(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    """Seconds of an exchange that do not depend on the lengths of messages: the order, votes, and first messages."""
    per_worker = first_messages(work, cluster, loads) / cluster.n_workers
    per_processor = per_worker * max(1.0, cluster.machine_workers / cluster.cores)
    return cluster.epoch_seconds + per_processor * (cluster.first_message_seconds or 0.0)


def _messages(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    return message_count(work, loads, float(np.median(cluster.rates("link_down"))))


PAUSE_MESSAGES = 2
"""Messages in a pause between two batches: an acknowledgement, and the next batch. Fitted with 3 and 4 workers."""

PROCESSORS, FIXED = "processors", "fixed cost"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time and traffic of an epoch.

    Parameters
    ----------
    work
        The job and the way of shuffling it.
    exact
        Whether a plan has as many workers. Otherwise the prediction is extrapolated.
    exchange_seconds
        Time from the start of the exchange until all workers have what they need.
    load_seconds
        Time of loading the first partitions, for which every chunk is read once; None if the storage is unknown.
    epoch_seconds
        Exchange time or training time, whichever is longer; the mean over all epochs, if only every K-th has an
        exchange. All other figures are those of an exchange.
    resources
        ``(name, seconds)`` that each part of the cluster is busy, the busiest first. The ``"fixed cost"`` among them
        is the part that does not depend on how much moves: the order, first messages, and votes.
    needed, packets
        Number of samples that a worker lacks, and of packets sent to deliver them.
    server_egress, worker_egress, worker_ingress, storage_bytes
        Bytes of an exchange: out of the server, out of all workers, into all workers from other participants, and out
        of the storage.
    most_ingress
        Bytes into the worker that receives the most, including reads from the storage if they use the link.
    requests
        Number of objects read from the storage.
    read_amplification
        Bytes read from the storage per byte needed.
    """

    work: Work
    exact: bool
    exchange_seconds: float
    load_seconds: float | None
    epoch_seconds: float
    resources: tuple[tuple[str, float], ...]
    needed: float
    packets: float
    server_egress: float
    worker_egress: float
    worker_ingress: float
    storage_bytes: float
    most_ingress: float
    requests: float
    read_amplification: float

    @property
    def bottleneck(self) -> str:
        """Name of the busiest part of the cluster, or ``"fixed cost"``; empty if nothing moves."""
        return self.resources[0][0] if self.resources else ""

    @property
    def wire_seconds(self) -> float:
        """Time that the busiest link, or the store, takes by itself."""
        return max((seconds for name, seconds in self.resources if name not in (PROCESSORS, FIXED)), default=0.0)


def predict(cluster: ClusterRates, work: Work, *, most_samples: int = MOST_SAMPLES) -> Prediction:
    """Predict the time and traffic of an epoch, from a real plan.

    Parameters
    ----------
    most_samples
        Largest number of samples in a plan, which also has at most 64 workers. From there on loads are extrapolated.

    Raises
    ------
    InvalidParameter
        If the way is not possible, for instance because there is no storage or the delivery does not support this many
        workers.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, server_up=12.5e6)
    >>> from dshuffle.planning import Choices
    >>> work = Work(400_000, 1024, Choices(delivery="server", cache_fraction=0.5))
    >>> server = predict(cluster, work)
    >>> round(server.exchange_seconds, 1), [name for name, _ in server.resources[:2]]
    (17.2, ['server egress', 'worker ingress'])
    """
    return timed(cluster, work, loads_of(cluster, work, most_samples=most_samples))


def timed(cluster: ClusterRates, work: Work, loads: Loads) -> Prediction:
    """Compute times from loads; docs/design.md, "Predicting", has the formulas.

    Links and storage work at the same time, so the slowest one determines the time. There are three exceptions. Relays
    pass on a batch of packets once all of it has arrived. Workers that read the most share the storage with all others
    at first, but only their own links limit them in the end. The first message is packed before links are busy, and the
    last one is unpacked after that.

    Processors are shared by all of this, and their time overlaps less with that of the network. The two times are
    combined as the cube root of the sum of their cubes. We fitted the exponent 3.
    """
    resources, exchange = _exchange(cluster, work, loads)
    first = work.with_choices(delivery="peer"), first_load(work, cluster)
    load_seconds = None if cluster.storage is None else _exchange(cluster, *first)[1]
    from_storage = loads.read if cluster.storage_over_links else 0.0
    training, every = work.training_seconds or 0.0, work.choices.every
    return Prediction(
        work=work,
        exact=cluster.n_workers <= MOST_WORKERS,
        exchange_seconds=exchange,
        load_seconds=load_seconds,
        epoch_seconds=(max(exchange, training) + (every - 1) * training) / every,
        resources=tuple(sorted(((name, busy) for name, busy in resources.items() if busy), key=lambda item: -item[1])),
        needed=loads.needed,
        packets=loads.packets,
        server_egress=loads.server_out,
        worker_egress=float(loads.worker_out.sum()),
        worker_ingress=float(loads.worker_in.sum()),
        storage_bytes=float(loads.read.sum()),
        most_ingress=float((loads.worker_in + from_storage).max()),
        requests=float(loads.requests.sum()),
        read_amplification=loads.amplification,
    )


def _exchange(cluster: ClusterRates, work: Work, loads: Loads) -> tuple[dict[str, float], float]:
    """How long each part of the cluster is busy, and how long all of it takes."""
    resources = {name: seconds for name, seconds in _seconds(cluster, work, loads).items() if seconds > 0}
    if not resources:
        return resources, 0.0
    wire = max((seconds for name, seconds in resources.items() if name != PROCESSORS), default=0.0)
    served = resources.get("server egress", 0.0)
    wire = max(wire, _reading_seconds(cluster, loads), relayed_seconds(work, cluster, loads, served))
    wire += ends_seconds(work, cluster, loads)
    together = float(np.cbrt(wire**3 + resources.get(PROCESSORS, 0.0) ** 3))
    resources[FIXED] = fixed_seconds(work, cluster, loads)
    return resources, together + resources[FIXED]


def _seconds(cluster: ClusterRates, work: Work, loads: Loads) -> dict[str, float]:
    """Compute how long each part of the cluster is busy."""
    up, down = cluster.rates("link_up"), cluster.rates("link_down")
    wire = 1 + cluster.wire_overhead
    entering = loads.worker_in + (loads.read if cluster.storage_over_links else 0.0)
    if cluster.storage_client is not None and not loads.worker_in.any():
        down = np.maximum(down, cluster.storage_client)  # a worker that only reads is not slowed by sending
    served = loads.server_out
    if cluster.server_up is None and served:
        # The first worker serves: its own rows stay off the network, and what it relays leaves by the same link.
        served = served * (1 - 1 / cluster.n_workers) + float(loads.worker_out[0])
    seconds = {
        "server egress": served * wire / cluster.server_link,
        "worker ingress": float((entering / down).max()) * wire,
        "worker egress": float((loads.worker_out / up).max()) * wire,
        PROCESSORS: _processor_seconds(cluster, work, loads),
    }
    if loads.passed_on:
        slowest = float(np.minimum(up, down).min())
        seconds["scatter, then ring"] = seconds.pop("server egress") + loads.passed_on * wire / slowest
    if cluster.storage is not None:
        seconds["storage"] = float(loads.read.sum()) / cluster.storage
        seconds["storage requests"] = _request_seconds(cluster, loads)
        if cluster.storage_client is not None:
            seconds["storage for one worker"] = float(loads.read.max()) / cluster.storage_client
    return seconds


def _reading_seconds(cluster: ClusterRates, loads: Loads) -> float:
    """Time until all workers have read, if active readers share the storage equally up to the rate of their links.

    Returns 0 if links differ. The limits of each link and of the storage then determine the time.
    """
    if cluster.storage is None or not loads.read.any():
        return 0.0
    links = cluster.rates("link_down") / (1 + cluster.wire_overhead) if cluster.storage_over_links else math.inf
    own = cluster.storage_client or float(np.min(links))
    if own < np.max(links) and cluster.storage_client is None:
        return 0.0
    each = np.minimum(own, cluster.storage / np.arange(cluster.n_workers, 0, -1))
    return float((np.diff(np.sort(loads.read), prepend=0.0) / each).sum())


def _request_seconds(cluster: ClusterRates, loads: Loads) -> float:
    """Time that the busiest worker waits for its requests, or that the storage takes to answer all requests."""
    waiting = loads.requests * cluster.request_seconds
    if cluster.storage_connection is not None:
        waiting = waiting + loads.read / cluster.storage_connection
    return max(float(waiting.max()) / cluster.requests_at_once, float(loads.requests.sum()) / cluster.storage_requests)


def _processor_seconds(cluster: ClusterRates, work: Work, loads: Loads) -> float:
    """Processor time of the busiest machine divided by its number of processors.

    It is at least the time of the busiest process, because each process has one network thread.
    """
    messages = _messages(work, cluster, loads)
    if cluster.first_message_seconds is not None:
        messages -= first_messages(work, cluster, loads)
    workers = (
        loads.worker_out / cluster.send_rate
        + loads.worker_in / cluster.receive_rate
        + loads.decoded / cluster.decode_rate
        + loads.read / cluster.read_rate
        + messages / cluster.n_workers * cluster.message_seconds
    )
    if loads.worker_in.any() or loads.read.any():  # else the partition keeps its index
        workers = workers + work.alpha(cluster.n_workers) * work.n_samples * cluster.index_seconds
    server = loads.server_out / cluster.send_rate + loads.encoded / cluster.encode_rate
    machines = np.bincount(np.arange(cluster.n_workers) // cluster.machine_workers, workers)
    if cluster.server_on_machine:
        machines[0] += server
    return max(float(machines.max()) / cluster.cores, float(workers.max()), server)
