"""Cost model: predict the seconds and bytes of an epoch on a cluster, before anything runs, and recommend a way.

Loads are bytes on every part of the cluster, counted in a real plan of at most a million samples and 64 workers. From
there on they are extrapolated: with more samples, a worker gets so many times more of everything, and with more
workers, each of them does what one of 64 does in a job with the same share and the same excess of each worker. Times
are loads divided by rates. docs/design.md, "Predicting", has the formulas.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import Assignment, parse_assignment
from dshuffle.planning.delivery import (
    SIMPLEST,
    Delivery,
    check_delivery,
    coded_rate,
    get_delivery,
    suitable_deliveries,
)
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES, Pacing, batch_sizes, packets_per_batch, route
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.planner import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.types import Amounts, Integers
from dshuffle.units import human_bytes, human_seconds

Rate = float | tuple[float, ...]
"""Rate in bytes/s: one for all workers, or a tuple with one per worker."""
MESSAGE_SECONDS = 1e-3
"""Processor time per message during an exchange. A message sent alone takes longer, as it has to wake a process up."""
REQUESTS_AT_ONCE = 64
"""Requests to the storage that a worker keeps open."""
CHECKSUM_NBYTES = 4
"""Size in bytes of the checksum that is sent with each row."""


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
        for name in ("n_workers", "cores", "machine_workers"):
            as_integer(name, getattr(self, name), 1)
        for name in NOT_NEGATIVE:
            as_number(name, getattr(self, name) or 0.0, 0.0)
        for part, names in SCALABLE.items():
            for name in names:
                value = getattr(self, name)
                several = value if part == "links" and isinstance(value, tuple) else (value,)
                if len(several) not in (1, self.n_workers):
                    allowed = f"Give one rate, or {self.n_workers} rates, one for each worker."
                    raise InvalidParameter.because(name, f"it has {len(value)} rates", allowed)
                for rate in several if value is not None or part == "links" else ():
                    infinite = rate == math.inf and name.endswith(("up", "down"))
                    if not isinstance(rate, Real) or not float(rate) > 0 or infinite:
                        raise InvalidParameter.of(name, rate, "a rate > 0, which is finite for links and the server")

    def rates(self, name: str) -> Amounts:
        """Return ``link_up`` or ``link_down`` of each worker, ``(n,)`` in bytes/s."""
        return np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), (self.n_workers,))

    def scaled(self, part: str, factor: float) -> ClusterRates:
        """Return a copy with the rates of one part in :data:`SCALABLE` multiplied by a factor."""
        changes: dict[str, Any] = {"request_seconds": self.request_seconds / factor} if part == "storage" else {}
        for name in SCALABLE[part]:
            if (value := getattr(self, name)) is not None:
                changes[name] = tuple(rate * factor for rate in value) if isinstance(value, tuple) else value * factor
        return dataclasses.replace(self, **changes)


SCALABLE = {
    "links": ("link_up", "link_down"),
    "server": ("server_up",),
    "storage": ("storage", "storage_client", "storage_connection", "storage_requests"),
    "processors": ("send_rate", "receive_rate", "encode_rate", "decode_rate", "read_rate"),
}
"""Parts that can be scaled: name -> rates that change together. For storage, latency shrinks as rates grow."""


NOT_NEGATIVE = (
    *("request_seconds", "index_seconds", "message_seconds", "epoch_seconds", "first_message_seconds"),
    "wire_overhead",
)


def as_number(name: str, value: object, least: float) -> float:
    """Return ``value`` as a float, or raise :class:`InvalidParameter` if it is not a finite number >= ``least``."""
    if isinstance(value, Real) and least <= float(value) < math.inf:
        return float(value)
    raise InvalidParameter.of(name, value, f"a finite number >= {least:g}")


@dataclass(frozen=True, slots=True)
class Work:
    """One epoch of a job: its samples, and the way of shuffling them."""

    n_samples: int
    row_nbytes: int
    choices: Choices = field(default_factory=Choices)  # Its sharding, balance and seed do not change what it costs.
    chunk_rows: int = 64  # Samples per chunk, in the array with the most bytes. A chunk is one request.
    # Training time per epoch, during which the next epoch's samples are exchanged. None if unknown.
    training_seconds: float | None = None

    def __post_init__(self) -> None:
        get_delivery(self.choices.delivery)
        for name in ("n_samples", "row_nbytes", "chunk_rows"):
            as_integer(name, getattr(self, name), 1)
        as_number("training_seconds", self.training_seconds or 0.0, 0.0)

    def with_choices(self, **changes: Any) -> Work:
        """The same job with other choices."""
        return dataclasses.replace(self, choices=dataclasses.replace(self.choices, **changes))

    @property
    def rule(self) -> Assignment:
        """The assignment chosen."""
        return self.choices.assignment

    @property
    def delivery(self) -> Delivery:
        """The delivery chosen."""
        return get_delivery(self.choices.delivery)

    @property
    def group_rows(self) -> int:
        """Samples that move together: those of a chunk with ``chunks`` and ``chunks:ROWS``, otherwise 1."""
        return min(self.n_samples, self.rule.unit or self.chunk_rows)

    @property
    def way(self) -> str:
        """The label of the choices, for tables."""
        return self.choices.label

    def alpha(self, n_workers: int) -> float:
        """Return the cache fraction for ``n_workers`` workers."""
        least, chosen = Fraction(1, n_workers), self.choices.cache_fraction
        hint = f"Each of the {n_workers} workers must hold its own share of the samples."
        return float(least if chosen is None else as_ratio("cache_fraction", chosen, least, hint))

    def excess(self, n_workers: int) -> float:
        """Return the probability that a worker holds a sample outside its share."""
        share = 1 / n_workers
        return max(0.0, round((self.alpha(n_workers) - share) / (1 - share), 15)) if n_workers > 1 else 0.0

    def lacking(self, n_workers: int) -> float:
        """Expected number of samples that workers are to train on and do not hold, all together."""
        # Chung et al. (2017), Theorem 1 (equation 1), for ``global``; Nguyen et al. (2022), Algorithm 1, for
        # ``partial:Q``, here without fixed points. See docs/papers.md.
        fraction = self.rule.missing_fraction(self.alpha(n_workers), self.excess(n_workers))
        return self.n_samples * fraction if n_workers > 1 else 0.0


NONE = np.zeros(1)


class Loads(NamedTuple):
    """Bytes and counts of one epoch's exchange. Arrays are ``(n,)``, for each worker; ``(1,)`` if nothing moves."""

    needed: float = 0.0  # Number of samples that a worker lacks, and of packets sent to deliver them.
    packets: float = 0.0
    server_out: float = 0.0  # Bytes out of the server.
    encoded: float = 0.0  # Bytes of rows that the server reads to encode packets.
    worker_out: Amounts = NONE  # Bytes out of and into each worker for the exchange of rows.
    worker_in: Amounts = NONE
    decoded: Amounts = NONE  # Bytes of packets and rows that each worker reads to decode its rows.
    read: Amounts = NONE  # Bytes and number of objects that each worker reads from the storage.
    requests: Amounts = NONE
    passed_on: float = 0.0  # For the ring relay, the bytes that its second stage sends over a link; otherwise 0.
    needed_nbytes: float = 0.0  # Bytes of the rows needed from the storage. ``read`` counts their whole chunks.


MOST_WORKERS = 64
MOST_SAMPLES = 1_000_000
LEAST_CHUNKS = 4
"""Chunks of each worker in a plan, if the job has so many. With fewer, loads depend too much on chance."""
FIRST_EPOCH = 3
"""First epoch that may be planned. By then the caches hold what eviction has left, not what was loaded."""
FEW_UNITS = 10_000
"""Samples, or chunks that move as a whole, below which the loads differ much between epochs."""
EPOCHS_OF_FEW = 9
"""Number of epochs among which a typical one is chosen if there are so few."""
STEP = 4
"""How many times fewer samples a second plan has, which shows how packets depend on the number of samples."""
BATCH = 8192
"""Packets that a relay forwards together where loads are counted. The number hardly affects what each worker sends."""
RING_WAITS = 1.6
"""Time of a ring relative to links that are never idle; it is longer because rounds wait for each other.

Fitted to measurements with 8 workers: 1.3 and 1.4 at cache fractions of 0.2 and 0.35, 1.9 at 0.5, and 1.6 at 0.5 with
more samples.
"""


def loads_of(cluster: ClusterRates, work: Work, *, most_samples: int = MOST_SAMPLES) -> Loads:
    """Count the loads for :func:`~dshuffle.planning.cost.predict`. They do not depend on the rates of the cluster."""
    q, rule, delivery, row_nbytes = work.n_samples, work.rule, work.delivery, work.row_nbytes
    n = cluster.n_workers
    as_integer("n_samples", q, n, "There are fewer samples than workers.")
    rows, excess = work.lacking(n), work.excess(n)
    if not rule.moves or not rows:
        return Loads()
    check_delivery(delivery.name, n, excess=excess > 0)
    if delivery.reads_store and cluster.storage is None:
        raise InvalidParameter.of("storage", None, f"bytes a second for the delivery {delivery.name!r}")
    counted, like, small = min(n, MOST_WORKERS), q, work
    if n > counted:
        # The same share of each worker; where workers code in pairs, the same number of rows for each pair.
        like = math.ceil(q * (counted / n) ** (2 if delivery.coded and not excess else 1))
        small = work.with_choices(cache_fraction=1 / counted + excess * (1 - 1 / counted) if excess else None)
    least = LEAST_CHUNKS * counted * work.group_rows if rule.in_chunks else 1
    small = dataclasses.replace(small, n_samples=min(max(like, counted), max(most_samples, least)))
    plan, needed = _planned(small, counted)
    if excess and delivery.coded and plan.n_packets > needed / 2:  # too few samples to see how many a packet combines
        small = dataclasses.replace(small, n_samples=max(small.n_samples, min(like, MOST_SAMPLES)))
        plan, needed = _planned(small, counted)
    # Rows that a worker of the job receives for each row in the plan, and all workers together.
    growth = q / small.n_samples if n == counted else rows / n / (small.lacking(counted) / counted)
    times = growth * n / counted

    def each(amounts: Amounts | Integers, nbytes: float) -> Amounts:
        """The amounts of the workers in the job."""
        # By chance, workers differ the less the more samples or chunks they get.
        mean = amounts.mean()
        return np.resize(mean + (amounts - mean) / math.sqrt(max(1.0, growth)), n) * (growth * nbytes)

    received = np.bincount(plan.destinations, minlength=counted).astype(np.float64)
    fewer = (
        _fewer(small, counted, like, plan.n_packets / max(1, needed))
        if delivery.coded and small.n_samples < like
        else 1.0
    )
    packets = plan.n_packets * fewer
    loads = Loads(needed * times, packets * times)
    if delivery.reads_store:
        # A worker reads each chunk once. If its share is smaller in the job, so must chunks be.
        c = work.chunk_rows if rule.in_chunks else work.chunk_rows * growth * small.n_samples / q
        n_chunks = math.ceil(small.n_samples / c)
        worker, chunk = np.divmod(
            np.unique(plan.destinations.astype(np.int64) * n_chunks + (plan.samples // c).astype(np.int64)), n_chunks
        )
        parts = np.minimum(1.0, small.n_samples / c - chunk)  # the last chunk may be shorter
        return loads._replace(
            requests=each(np.bincount(worker, minlength=counted), 1.0),
            read=each(np.bincount(worker, parts, counted), work.chunk_rows * row_nbytes),
            needed_nbytes=received.sum() * times * row_nbytes,
        )
    row, senders, components = float(row_nbytes + CHECKSUM_NBYTES), plan.senders, plan.n_components
    relay = work.choices.relay
    if delivery.coded and packets:
        hops, handed_on = route(relay, plan, counted, BATCH), components - packets
        senders = hops.senders
        # The second stage of a ring takes ``(U - P) / n`` if the rings of all groups keep all links busy, and
        # ``P (m - 1) / m`` if one group follows the other (Chung et al. (2017), Theorem 4; see docs/papers.md, for a
        # single group of m workers). Measured durations are between the two.
        ring = min(RING_WAITS * handed_on / counted, packets * handed_on / components) if relay == "ring" else 0.0
        decoded = np.bincount(plan.destinations, np.diff(plan.offsets)[hops.packets], counted)
        loads = loads._replace(
            encoded=components * times * row_nbytes,
            decoded=each(decoded, row_nbytes / fewer),
            passed_on=ring * growth * row,
        )
    sent = np.count_nonzero(senders == SERVER) * (1.0 if relay == "unicast" else fewer)
    away = np.bincount(senders[senders >= 0], minlength=counted).astype(np.float64)
    return loads._replace(
        server_out=sent * times * row,
        worker_in=each(received, row),
        worker_out=each(away, row * (components - sent) / max(1.0, away.sum())),
    )


def _fewer(work: Work, n_workers: int, n_samples: int, per_sample: float) -> float:
    """Packets for each sample of a job of ``n_samples``, divided by those of the plan of ``work``."""
    # What is above the bound of Chung et al. (2017), Theorem 2, falls with each factor of :data:`STEP` as it fell from
    # a plan of fewer samples.
    q, alpha = work.n_samples, work.alpha(n_workers)
    plan, needed = _planned(dataclasses.replace(work, n_samples=q // STEP), n_workers)
    least = coded_rate(q, n_workers, max(-(-q // n_workers), int(alpha * q))) / (q * (1 - alpha))
    before, above = plan.n_packets / max(1, needed) - least, per_sample - least
    if not before > above > 0:
        return 1.0
    return float(least + above * (above / before) ** math.log(n_samples / q, STEP)) / per_sample


def first_load(work: Work, cluster: ClusterRates) -> Loads:
    """Loads of loading the first partitions: every chunk is read once, for all workers that hold its rows."""
    # Nothing is sent if all rows of a chunk go to one worker.
    n, q, row_nbytes = cluster.n_workers, work.n_samples, work.row_nbytes
    whole = work.rule.in_chunks or work.choices.sharding == "contiguous" or work.chunk_rows == 1
    sent = 0.0 if whole and not work.excess(n) else work.alpha(n) * q * (1 - 1 / n) * (row_nbytes + CHECKSUM_NBYTES)
    moved, requests = np.full(n, sent), np.full(n, math.ceil(q / work.chunk_rows) / n)
    read, nbytes = np.full(n, q * row_nbytes / n), float(q * row_nbytes)
    return Loads(q, worker_out=moved, worker_in=moved, read=read, requests=requests, needed_nbytes=nbytes)


def _planned(work: Work, n_workers: int) -> tuple[Packets, int]:
    """The packets of an epoch, and the number of samples that it delivers."""
    rule, chosen = work.rule.with_unit(work.group_rows), work.choices
    return _packets(work.n_samples, n_workers, Choices(rule, chosen.delivery, chosen.caching, chosen.cache_fraction))


@functools.lru_cache(maxsize=4)  # relays and rates do not change it
def _packets(n_samples: int, n_workers: int, choices: Choices) -> tuple[Packets, int]:
    # The epoch before is the same for all deliveries; one with a server can be planned again with another one.
    planner = _at_an_epoch(n_samples, n_workers, dataclasses.replace(choices, delivery="server"))
    assert planner.current is not None
    return planner.again(planner.current.epoch, choices.delivery).packets, planner.current.n_needed


@functools.lru_cache(maxsize=4)
def _at_an_epoch(n_samples: int, n_workers: int, choices: Choices) -> EpochPlanner:
    """A planner at an epoch to count; if there are few samples, at a typical one."""
    planner, epochs, lacking = EpochPlanner(ShuffleSpec(n_samples, n_workers, choices)), [], []
    planner.load()
    n_epochs = 1 if n_samples >= FEW_UNITS * (choices.assignment.unit or 1) else EPOCHS_OF_FEW
    for _ in range(FIRST_EPOCH + n_epochs - 1):
        epoch = planner.advance()
        epochs.append(copy.copy(planner))
        # Typical in two numbers: samples that are needed, and that one worker lacks.
        lacking.append([epoch.n_needed, int(np.bincount(epoch.packets.destinations).max(initial=0))])
    counted = np.array(lacking[-n_epochs:])
    distances = np.abs(counted / np.maximum(1, np.median(counted, axis=0)) - 1)
    return epochs[int(distances.sum(axis=1).argmin()) - n_epochs]


@functools.lru_cache(maxsize=256)  # called again for every scaled cluster
def _batch_sizes(packets: int, n_workers: int, row_nbytes: int) -> Integers:
    """The sizes of a worker's batches."""
    return np.array(batch_sizes(packets, n_workers, row_nbytes))


def message_counts(work: Work, cluster: ClusterRates, loads: Loads) -> tuple[float, float]:
    """Estimate the number of messages, and of those that are the first ones from their sender to their receiver."""
    delivery, relay, row_nbytes, n = work.delivery, work.choices.relay, work.row_nbytes, cluster.n_workers
    received, packets = float(loads.worker_in.sum()), round(loads.packets)
    rows = received / (row_nbytes + CHECKSUM_NBYTES)
    if not rows:
        return 0.0, 0.0
    # A server sends to every worker; as relays, and as peers, workers send to each other.
    among = n * (n - 1) if not delivery.needs_server or (delivery.coded and relay != "unicast") else 0
    pairs = float(among + n * delivery.needs_server)
    if not delivery.coded:  # those of a server are full
        rate = math.inf if delivery.needs_server else float(np.median(cluster.rates("link_down")))
        pacing = Pacing.of(rate, message_bytes=MESSAGE_BYTES, window_bytes=WINDOW_BYTES)
        full = max(1, pacing.message_nbytes // row_nbytes)
        messages = pairs * max(1, math.ceil(round(rows / pairs) / full))
    elif relay == "pipelined":  # it forwards each batch in one message to each of the other workers
        sizes = _batch_sizes(packets, n, row_nbytes)
        # Probability that another worker needs a packet. A batch without one is not sent to it.
        probability = min(1.0, (rows / packets - 1) / max(1, n - 1))
        messages = n * len(sizes) + n * (n - 1) * float((1 - (1 - probability) ** sizes).sum())
    else:
        messages = rows / packets_per_batch(packets, n, row_nbytes)
        # In a ring, a worker sends one message to each of the others in every round but the last.
        rounds = received / loads.server_out - 1
        messages = max(float(n), messages) if relay == "unicast" else n * (1 + (n - 1) * rounds) + messages
    messages = min(rows, messages)
    return messages, min(messages, pairs)


def relayed_seconds(work: Work, cluster: ClusterRates, loads: Loads, server_seconds: float) -> float:
    """Seconds until relays have passed on all batches, each once all of it has arrived; 0 without such relays."""
    if not work.delivery.coded or work.choices.relay != "pipelined" or loads.packets < 1:
        return 0.0
    n, wire = cluster.n_workers, 1 + cluster.wire_overhead
    served, up, down = loads.server_out / n, cluster.rates("link_up"), cluster.rates("link_down")
    to_others = float((loads.worker_out / up).max()) * wire
    from_others = float(((loads.worker_in - served) / down).max()) * wire
    from_server = float((served / down).max()) * wire
    # When batch k has arrived, the server has sent a part of all packets, and this batch and those after it are left to
    # pass on. Batches that are sent at a time share the link, so each arrives later than alone. If all workers have one
    # at a time, the server pauses after each. Without room for one of each, requests of other workers wait already.
    sizes, at_a_time = _batch_sizes(round(loads.packets), n, work.row_nbytes), WINDOW_BYTES // MESSAGE_BYTES // n
    parts = sizes / np.sum(sizes)
    until = np.cumsum(parts)
    sent = until[np.minimum(np.arange(len(parts)) + max(1, at_a_time) - 1, len(parts) - 1)]
    left, pauses = 1 - until + parts, len(parts) - 1 if at_a_time == 1 else 0
    arriving = left * from_others + (1 - sent) * from_server
    last = float((sent * server_seconds + np.maximum(left * to_others, arriving)).max())
    return pauses * PAUSE_MESSAGES * (cluster.first_message_seconds or 0.0) + last


PAUSE_MESSAGES = 2
"""Messages in a pause between two batches: an acknowledgement, and the next batch. Fitted with 3 and 4 workers."""


def ends_seconds(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    """Seconds in which no link is busy: to pack the first message, and to unpack the last one."""
    messages, _ = message_counts(work, cluster, loads)
    ends = 1 / cluster.send_rate + 1 / cluster.receive_rate
    return float(loads.worker_in.sum()) / messages * ends if messages else 0.0


PROCESSORS, FIXED = "processors", "fixed cost"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time and traffic of an epoch."""

    work: Work
    exact: bool  # Whether a plan has as many workers. Otherwise the prediction is extrapolated.
    exchange_seconds: float  # Time from the start of the exchange until all workers have what they need.
    # Time of loading the first partitions, for which every chunk is read once; None if the storage is unknown.
    load_seconds: float | None
    # Exchange time or training time, whichever is longer; the mean over all epochs, if only every K-th has an exchange.
    # All other figures are those of an exchange.
    epoch_seconds: float
    # ``(name, seconds)`` that each part of the cluster is busy, the busiest first. The ``"fixed cost"`` among them is
    # the part that does not depend on how much moves: the order, first messages, and votes.
    resources: tuple[tuple[str, float], ...]
    needed: float  # needed, packets: Samples that a worker lacks, and packets sent to deliver them.
    packets: float
    # Bytes of an exchange: out of the server, out of all workers, into all workers from other participants, and out of
    # the storage.
    server_egress: float
    worker_egress: float
    worker_ingress: float
    storage_bytes: float
    # Bytes into the worker that receives the most, including reads from the storage if they use the link.
    most_ingress: float
    requests: float  # Number of objects read from the storage.
    read_amplification: float  # Bytes read from the storage per byte needed.

    @property
    def bottleneck(self) -> str:
        """Name of the busiest part of the cluster, or ``"fixed cost"``; empty if nothing moves."""
        return self.resources[0][0] if self.resources else ""

    @property
    def wire_seconds(self) -> float:
        """Time that the busiest link, or the store, takes by itself."""
        return max((seconds for name, seconds in self.resources if name not in (PROCESSORS, FIXED)), default=0.0)


def predict(cluster: ClusterRates, work: Work, *, most_samples: int = MOST_SAMPLES) -> Prediction:
    """Predict the time and traffic of an epoch, from a real plan of at most so many samples and 64 workers.

    It raises :class:`InvalidParameter` if the way is not possible, for instance because there is no storage.

    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, server_up=12.5e6)
    >>> server = predict(cluster, Work(400_000, 1024, Choices(delivery="server", cache_fraction=0.5)))
    >>> round(server.exchange_seconds, 1), [name for name, _ in server.resources[:2]]
    (17.2, ['server egress', 'worker ingress'])
    """
    return timed(cluster, work, loads_of(cluster, work, most_samples=most_samples))


def timed(cluster: ClusterRates, work: Work, loads: Loads) -> Prediction:
    """Compute times from loads; docs/design.md, "Predicting", has the formulas."""
    resources, exchange = _exchange(cluster, work, loads)
    load_seconds = None
    if cluster.storage is not None:
        load_seconds = _exchange(cluster, work.with_choices(delivery=SIMPLEST), first_load(work, cluster))[1]
    training, every, read = work.training_seconds or 0.0, work.choices.every, float(loads.read.sum())
    return Prediction(
        work=work,
        exact=cluster.n_workers <= MOST_WORKERS,
        exchange_seconds=exchange,
        load_seconds=load_seconds,
        epoch_seconds=(max(exchange, training) + (every - 1) * training) / every,
        resources=tuple(sorted(resources.items(), key=lambda item: -item[1])),
        needed=loads.needed,
        packets=loads.packets,
        server_egress=loads.server_out,
        worker_egress=float(loads.worker_out.sum()),
        worker_ingress=float(loads.worker_in.sum()),
        storage_bytes=read,
        most_ingress=float((loads.worker_in + loads.read * cluster.storage_over_links).max()),
        requests=float(loads.requests.sum()),
        read_amplification=read / loads.needed_nbytes if loads.needed_nbytes else 1.0,
    )


def _exchange(cluster: ClusterRates, work: Work, loads: Loads) -> tuple[dict[str, float], float]:
    """How long each part of the cluster is busy, and how long all of it takes."""
    # Links and storage work at the same time, so the slowest one determines the time. There are three exceptions.
    # Relays pass on a batch of packets once all of it has arrived. Workers that read the most share the storage with
    # all others at first, but only their own links limit them in the end. The first message is packed before links are
    # busy, and the last one is unpacked after that.
    # Processors are shared by all of this, and their time overlaps less with that of the network. The two times are
    # combined as the cube root of the sum of their cubes. We fitted the exponent 3.
    n, wire, reads = cluster.n_workers, 1 + cluster.wire_overhead, bool(loads.read.any())
    up, down, served = cluster.rates("link_up"), cluster.rates("link_down"), loads.server_out
    moves = bool(loads.worker_in.any())
    if cluster.storage_client is not None and not moves:
        down = np.maximum(down, cluster.storage_client)  # a worker that only reads is not slowed by sending
    if cluster.server_up is None and served:
        # The first worker serves: its own rows stay off the network, and what it relays leaves by the same link.
        served = served * (1 - 1 / n) + float(loads.worker_out[0])
    messages, firsts = message_counts(work, cluster, loads)
    entering = loads.worker_in + loads.read * cluster.storage_over_links
    busy = {
        "server egress": served * wire / (float(up[0]) if cluster.server_up is None else cluster.server_up),
        "worker ingress": float((entering / down).max()) * wire,
        "worker egress": float((loads.worker_out / up).max()) * wire,
    }
    if loads.passed_on:
        slowest = float(np.minimum(up, down).min())
        busy["scatter, then ring"] = busy.pop("server egress") + loads.passed_on * wire / slowest
    reading = 0.0
    if cluster.storage is not None:
        waiting = loads.requests * cluster.request_seconds + loads.read / (cluster.storage_connection or math.inf)
        busy["storage"] = float(loads.read.sum()) / cluster.storage
        answered = float(loads.requests.sum()) / cluster.storage_requests
        busy["storage requests"] = max(float(waiting.max()) / REQUESTS_AT_ONCE, answered)
        busy["storage for one worker"] = float(loads.read.max()) / (cluster.storage_client or math.inf)
        # Active readers share the storage equally, up to the rate of their links, if these are alike.
        links = cluster.rates("link_down") / wire if cluster.storage_over_links else np.array([math.inf])
        own = cluster.storage_client or float(links.min())
        if reads and (cluster.storage_client or own == links.max()):
            alone = np.minimum(own, cluster.storage / np.arange(n, 0, -1))
            reading = float((np.diff(np.sort(loads.read), prepend=0.0) / alone).sum())
    network = max(busy.values())
    # The processor time of the busiest machine divided by its number of processors. It is at least the time of the
    # busiest process, because each process has one network thread.
    counted = messages - (0.0 if cluster.first_message_seconds is None else firsts)
    workers = np.broadcast_to(
        loads.worker_out / cluster.send_rate
        + loads.worker_in / cluster.receive_rate
        + loads.decoded / cluster.decode_rate
        + loads.read / cluster.read_rate
        + counted / n * cluster.message_seconds,
        n,
    )
    if moves or reads:  # else the partition keeps its index
        workers = workers + work.alpha(n) * work.n_samples * cluster.index_seconds
    server = loads.server_out / cluster.send_rate + loads.encoded / cluster.encode_rate
    machines = np.bincount(np.arange(n) // cluster.machine_workers, workers)
    machines[0] += server * cluster.server_on_machine
    busy[PROCESSORS] = max(float(machines.max()) / cluster.cores, float(workers.max()), server)
    if not any(busy.values()):
        return {}, 0.0
    relayed = relayed_seconds(work, cluster, loads, busy.get("server egress", 0.0))
    links_seconds = max(network, reading, relayed) + ends_seconds(work, cluster, loads)
    together = float(np.cbrt(links_seconds**3 + busy[PROCESSORS] ** 3))
    # The order, votes, and first messages do not depend on how much moves.
    per_processor = firsts / n * max(1.0, cluster.machine_workers / cluster.cores)
    busy[FIXED] = cluster.epoch_seconds + per_processor * (cluster.first_message_seconds or 0.0)
    return {name: seconds for name, seconds in busy.items() if seconds}, together + busy[FIXED]


class Bill(NamedTuple):
    """What a job costs, in the currency of the price."""

    load: float  # Loading the samples of the first epoch from the store.
    epoch: float  # Any later epoch, on average.

    @classmethod
    def of(cls, egress_price: float, prediction: Prediction, cluster: ClusterRates) -> Self:
        """The bill of a job, from the price of a gigabyte (1e9 bytes) that leaves the store or the server."""
        # What a server reads is not in it, nor what is read again after a fault.
        price = as_number("egress_price", egress_price, 0.0) / 1e9
        choices, exchange = prediction.work.choices, price * (prediction.server_egress + prediction.storage_bytes)
        load = price * float(first_load(prediction.work, cluster).read.sum())
        return cls(load, exchange / choices.every)

    def to_dict(self) -> dict[str, float]:
        """The amounts by name, as JSON can hold them."""
        return {f"price_of_{name}": value for name, value in self._asdict().items()}


ASSIGNMENTS = ("local", "partial:0.1", "global", "aligned", "chunks")
SAMPLES = 100_000
"""Most samples of a plan made to compare ways. Fewer than in :func:`predict`, because many plans are made."""
EQUALLY = 0.02
"""Relative tolerance for equal times."""
FACTORS = (np.geomspace(1, 1 / 256, 65)[1:], np.geomspace(1, 256, 65)[1:])
"""Factors by which rates are scaled to find out what would change the recommendation: down, and up."""

Candidate = tuple[Work, Loads]


class Change(NamedTuple):
    """A change of the cluster that would make another way the fastest."""

    what: str  # Scaled part of the cluster: a key of :data:`SCALABLE`.
    factor: float  # Changed rate divided by the present rate.
    winner: Prediction  # That of the fastest way on the changed cluster.


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended way of shuffling, and why."""

    best: Prediction  # Fastest way to shuffle globally.
    # Way that shuffles less, if training does not hide ``best`` but hides this one. None if training hides ``best``, or
    # if the training time is unknown.
    instead: Prediction | None
    whole_chunks: Prediction | None  # Way that moves whole chunks, if it is faster than ``best``.
    verdict: str  # verdict, reason: One sentence each; notes: further ones.
    reason: str
    notes: tuple[str, ...]
    # For each part of the cluster, the smallest slowdown and the smallest speed-up that would make another way the
    # fastest.
    changes: tuple[Change, ...]
    predictions: tuple[Prediction, ...]  # Those of all ways, in their order.


def all_ways(cluster: ClusterRates, work: Work, *, assignments: Sequence[str] = ASSIGNMENTS) -> tuple[Work, ...]:
    """List every way of doing the work that the cluster and the caches allow.

    The assignment, delivery, relay and caching of the work are ignored.

    >>> cluster = ClusterRates(4, link_up=1e9, link_down=1e9)
    >>> [way.way for way in all_ways(cluster, Work(1000, 64), assignments=["local", "partial:0.1"])][:4]
    ['local', 'partial:0.1 + peer', 'partial:0.1 + server', 'partial:0.1 + leftover, pipelined']
    """
    ways: list[Work] = []
    n, excess = cluster.n_workers, work.excess(cluster.n_workers) > 0
    suitable = suitable_deliveries(n, excess=excess, has_server=True, has_storage=cluster.storage is not None)
    for rule in map(parse_assignment, assignments):
        choices = work.choices.with_assignment(rule, caching=None, delivery=SIMPLEST, relay="pipelined")
        base = dataclasses.replace(work, choices=choices)
        if not rule.moves:
            ways.append(base)
            continue
        if rule.in_chunks and -(-work.n_samples // base.group_rows) < n:
            continue  # some workers would have nothing
        families: set[str] = set()
        for delivery in suitable:
            if delivery.gains_by(needs_holders=rule.needs_holders, in_chunks=rule.in_chunks, excess=excess):
                relays = delivery.relays[:1] if delivery.family in families else delivery.relays
                families.add(delivery.family)  # the first one of a family is compared with every relay
                ways += [base.with_choices(delivery=delivery.name, relay=relay) for relay in relays]
    return tuple(ways)


def compare_costs(cluster: ClusterRates, ways: Sequence[Work]) -> list[Prediction]:
    """Predict several ways on one cluster, in the given order. Plans have at most :data:`SAMPLES` samples.

    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6)
    >>> ways = all_ways(cluster, Work(100_000, 1024), assignments=["global"])
    >>> min(compare_costs(cluster, ways), key=lambda p: p.exchange_seconds).work.way
    'global + peer'
    """
    return [predict(cluster, way, most_samples=SAMPLES) for way in ways]


def recommend(cluster: ClusterRates, ways: Sequence[Work]) -> Recommendation:
    """Recommend the fastest way to shuffle globally, with reasons and what would change the recommendation.

    At least one of the ways must shuffle globally; others are compared with the best of these.

    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, storage=50e6, storage_over_links=False)
    >>> advice = recommend(cluster, all_ways(cluster, Work(100_000, 1024)))
    >>> advice.verdict, [(change.what, change.winner.work.delivery.name) for change in advice.changes]
    ('Use global + peer: 948 ms per epoch.', [('links', 'storage'), ('storage', 'storage')])
    """
    candidates = [(way, loads_of(cluster, way, most_samples=SAMPLES)) for way in ways]
    shuffling = [candidate for candidate in candidates if candidate[0].rule.redraws_all]
    if not shuffling:
        raise InvalidParameter.of("ways", [way.way for way in ways], "a list with a 'global' or 'aligned' way")
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    everything = [p for p in predictions if p.work.rule.redraws_all]
    best = everything[_fastest(list(map(_took, everything)))]
    took, training, instead = best.exchange_seconds, best.work.training_seconds, None
    whole = min((p for p in predictions if p.work.rule.in_chunks), key=_took, default=None)
    if whole is not None and whole.exchange_seconds * (1 + EQUALLY) >= took:
        whole = None
    pace = f"{human_seconds(took)} per {'epoch' if best.work.choices.every == 1 else 'exchange'}"
    verdict, notes = f"Use {best.work.way}: {pace}.", []
    if training is not None and took <= training:
        notes.append(f"The exchange is hidden behind {human_seconds(training)} of training.")
    elif training is not None:
        rules = [(p, p.work.rule) for p in predictions]
        # Ways with which every worker exchanges a part of its samples, one by one.
        parts = [
            p for p, rule in rules if rule.moves and not (rule.redraws_all or rule.in_chunks or rule.needs_holders)
        ]
        fits = [p for p in predictions if (p in parts or not p.work.rule.moves) and p.exchange_seconds <= training]
        # Of those that training hides, the way that shuffles the most.
        instead = min(fits, key=lambda p: (-p.work.rule.shuffled_fraction, p.exchange_seconds), default=None)
        if instead is not None:
            verdict = (
                f"Do not shuffle globally: the fastest way ({best.work.way}) takes {pace}, but training takes only "
                f"{human_seconds(training)}. Use {instead.work.way} ({human_seconds(instead.exchange_seconds)})."
            )
        else:
            notes.append(f"The exchange takes longer than training ({human_seconds(training)}).")
        sent = min((p for p in parts if p.exchange_seconds and not p.storage_bytes), key=_took, default=None)
        fraction = 0.0 if sent is None else sent.work.rule.shuffled_fraction * training / sent.exchange_seconds
        if 0.001 <= fraction < 1:
            notes.append(f"Training can hide the exchange of up to partial:{fraction:.2g}.")
    if whole is not None:
        notes.append(
            f"Moving whole chunks ({whole.work.way}) takes {human_seconds(whole.exchange_seconds)}. It mixes less, as "
            "their rows stay together."
        )
    changes, reason = _changes(cluster, shuffling, best), _reason(best, predictions)
    return Recommendation(best, instead, whole, verdict, reason, tuple(notes), changes, tuple(predictions))


def _took(prediction: Prediction) -> float:
    return prediction.exchange_seconds


def _reason(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """What limits the best way, and the fastest one of each other family."""
    took, families = best.exchange_seconds, {best.work.delivery.family}
    sentences = [f"{best.work.delivery.name}: {_limit(best)}"]
    for p in sorted(predictions, key=_took):
        if p.work.rule.redraws_all and p.work.delivery.family not in families:
            families.add(p.work.delivery.family)
            ratio = f"would take {p.exchange_seconds / took:.3g} times as long" if took else "takes longer"
            sentences.append(f"{p.work.delivery.name} {ratio}: {_limit(p)}")
    return "; ".join(sentences) + "."


def _limit(p: Prediction) -> str:
    """What limits the speed of a way."""
    if not p.resources:
        return "nothing has to move"
    name, seconds = p.resources[0]
    nbytes = {"server egress": p.server_egress, "worker ingress": p.most_ingress, "storage": p.storage_bytes}.get(name)
    of = "" if nbytes is None else f" of {human_bytes(nbytes)}"
    more = f", {p.read_amplification:.3g} times what it needs" if p.read_amplification > 1 + EQUALLY else ""
    coded = f", {p.needed / p.packets:.1f} rows per packet" if p.packets < p.needed else ""
    return f"{name}{of} takes {human_seconds(seconds)}{more}{coded}"


def _fastest(seconds: Sequence[float]) -> int:
    """The place of the first time that is about the least; strategies are ordered from simple to complex."""
    return next(place for place, took in enumerate(seconds) if took <= min(seconds) * (1 + EQUALLY))


def _changes(cluster: ClusterRates, candidates: Sequence[Candidate], best: Prediction) -> tuple[Change, ...]:
    """Find, for each scalable part, the factors nearest to 1, below and above, at which another way wins."""
    changes = []
    for what, rates in SCALABLE.items():
        if all(getattr(cluster, rate) in (None, math.inf) for rate in rates):
            continue
        for factors in FACTORS:
            for factor in factors.tolist():
                scaled = cluster.scaled(what, factor)
                winner = candidates[_fastest([_exchange(scaled, *candidate)[1] for candidate in candidates])]
                if winner[0].way != best.work.way:
                    changes.append(Change(what, factor, timed(scaled, *winner)))
                    break
    return tuple(changes)
