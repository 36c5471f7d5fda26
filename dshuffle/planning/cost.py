"""Cost model: predict the seconds and bytes of an epoch on a cluster, before anything runs, and recommend a way.

Loads are bytes on every part of the cluster, counted in a real plan of at most a million samples and 64 workers. From
there on they are extrapolated. With more samples, a worker gets so many times more of everything, and coded packets
combine a little more. With more workers, each of them does what one of 64 does in a job with the same share and the
same excess of each worker. Times are loads divided by rates. docs/design.md, "Predicting", has the formulas.
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
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import parse_assignment
from dshuffle.planning.bounds import coded_rate
from dshuffle.planning.delivery import SIMPLEST, Delivery, check_delivery, get_delivery, suitable_deliveries
from dshuffle.planning.delivery.relay import (
    MESSAGE_BYTES,
    WINDOW_BYTES,
    Pacing,
    batch_sizes,
    packets_per_batch,
    route,
)
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.shuffle_spec import Choices, ShuffleSpec
from dshuffle.planning.types import Amounts
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
        for part, names in SCALABLE.items():
            for name in names:
                value = getattr(self, name)
                several = value if part == "links" and isinstance(value, tuple) else (value,)
                if len(several) not in (1, self.n_workers):
                    allowed = f"Give one rate, or {self.n_workers} rates, one for each worker."
                    raise InvalidParameter.because(name, f"it has {len(value)} rates", allowed)
                for rate in several if value is not None or part == "links" else ():
                    _check_rate(name, rate, infinite=not name.endswith(("up", "down")))
        for name in ("request_seconds", "index_seconds", "message_seconds", "wire_overhead", "epoch_seconds"):
            as_number(name, getattr(self, name), 0.0)
        as_number("first_message_seconds", self.first_message_seconds or 0.0, 0.0)

    def rates(self, name: str) -> Amounts:
        """Return ``link_up`` or ``link_down`` of each worker, ``(n,)`` in bytes/s."""
        return np.broadcast_to(np.asarray(getattr(self, name), dtype=np.float64), (self.n_workers,))

    def scaled(self, name: str, factor: float) -> ClusterRates:
        """Return a copy with the rates of one part in :data:`SCALABLE` multiplied by a factor."""
        changes: dict[str, Any] = {}
        for rate_name in SCALABLE[name]:
            value = getattr(self, rate_name)
            if value is not None:
                several = isinstance(value, tuple)
                changes[rate_name] = tuple(rate * factor for rate in value) if several else value * factor
        if name == "storage":
            changes["request_seconds"] = self.request_seconds / factor
        return dataclasses.replace(self, **changes)


SCALABLE = {
    "links": ("link_up", "link_down"),
    "server": ("server_up",),
    "storage": ("storage", "storage_client", "storage_connection", "storage_requests"),
    "processors": ("send_rate", "receive_rate", "encode_rate", "decode_rate", "read_rate"),
}
"""Parts that can be scaled: name -> rates that change together. For storage, latency shrinks as rates grow."""


def as_number(name: str, value: object, least: float) -> float:
    """Return ``value`` as a float, or raise :class:`InvalidParameter` if it is not a finite number >= ``least``."""
    if isinstance(value, Real) and least <= float(value) < math.inf:
        return float(value)
    raise InvalidParameter.of(name, value, f"a finite number >= {least:g}")


def _check_rate(name: str, value: object, *, infinite: bool) -> None:
    if not isinstance(value, Real) or not float(value) > 0 or (float(value) == math.inf and not infinite):
        raise InvalidParameter.of(name, value, ("a" if infinite else "a finite") + " rate > 0")


@dataclass(frozen=True, slots=True)
class Work:
    """One epoch of a job: its samples, and the way of shuffling them.

    Parameters
    ----------
    n_samples
        Number of samples in the dataset.
    row_nbytes
        Bytes per sample.
    choices
        The way of shuffling. Its sharding, balance and seed do not change what an epoch costs.
    chunk_rows
        Number of samples per chunk, in the array with the most bytes. A chunk is one request.
    training_seconds
        Training time per epoch, during which the next epoch's samples are exchanged. None if unknown.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.

    Examples
    --------
    >>> work = Work(100_000, 1024, Choices("partial:0.1"))
    >>> work.way, work.delivery.name
    ('partial:0.1 + peer', 'peer')
    """

    n_samples: int
    row_nbytes: int
    choices: Choices = field(default_factory=Choices)
    chunk_rows: int = 64
    training_seconds: float | None = None

    def __post_init__(self) -> None:
        get_delivery(self.choices.delivery)
        for name in ("n_samples", "row_nbytes", "chunk_rows"):
            as_integer(name, getattr(self, name), 1)
        if self.training_seconds is not None:
            as_number("training_seconds", self.training_seconds, 0.0)

    def with_choices(self, **changes: Any) -> Work:
        """The same job with other choices."""
        return dataclasses.replace(self, choices=dataclasses.replace(self.choices, **changes))

    @property
    def delivery(self) -> Delivery:
        """The delivery chosen."""
        return get_delivery(self.choices.delivery)

    @property
    def fraction(self) -> float:
        """Q: the fraction of its share that every worker exchanges; 1 unless the assignment has its own."""
        return self.choices.assignment.shuffled_fraction

    @property
    def in_chunks(self) -> bool:
        """Whether whole chunks move."""
        return self.choices.assignment.in_chunks

    @property
    def group_rows(self) -> int:
        """Samples that move together: those of a chunk with ``chunks`` and ``chunks:ROWS``, otherwise 1."""
        return min(self.n_samples, self.choices.assignment.unit or self.chunk_rows)

    @property
    def way(self) -> str:
        """The label of the choices, for tables."""
        return self.choices.label

    def alpha(self, n_workers: int) -> float:
        """Return the cache fraction for ``n_workers`` workers."""
        least = Fraction(1, n_workers)
        if self.choices.cache_fraction is None:
            return float(least)
        hint = f"Each of the {n_workers} workers must hold its own share of the samples."
        return float(as_ratio("cache_fraction", self.choices.cache_fraction, least, hint))

    def excess(self, n_workers: int) -> float:
        """Return the probability that a worker holds a sample outside its share.

        Examples
        --------
        >>> Work(1000, 8, Choices(cache_fraction=0.55)).excess(10), Work(1000, 8).excess(10)
        (0.5, 0.0)
        """
        share = 1 / n_workers
        return max(0.0, round((self.alpha(n_workers) - share) / (1 - share), 15)) if n_workers > 1 else 0.0

    def lacking(self, n_workers: int) -> float:
        """Expected number of samples that workers are to train on and do not hold, all together.

        References
        ----------
        Chung et al. (2017), Theorem 1 (equation 1), for ``global``; Nguyen et al. (2022), Algorithm 1, for
        ``partial:Q``, here without fixed points. See docs/papers.md.
        """
        fraction = self.choices.assignment.missing_fraction(self.alpha(n_workers), self.excess(n_workers))
        return self.n_samples * fraction if n_workers > 1 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes and counts of one epoch's exchange. Arrays of shape ``(n,)`` are per worker."""

    needed: float  # Number of samples that a worker lacks, and of packets sent to deliver them.
    packets: float
    server_out: float  # Bytes out of the server.
    encoded: float  # Bytes of rows that the server reads to encode packets.
    worker_out: Amounts  # ``(n,)`` bytes out of and into each worker for the exchange of rows.
    worker_in: Amounts
    decoded: Amounts  # ``(n,)`` bytes of packets and rows that each worker reads to decode its rows.
    read: Amounts  # ``(n,)`` bytes and number of objects that each worker reads from the storage.
    requests: Amounts
    passed_on: float = 0.0  # For the ring relay, the bytes that its second stage sends over a link; otherwise 0.
    needed_nbytes: float = 0.0  # Bytes of the rows needed from the storage. ``read`` counts their whole chunks.

    @classmethod
    def none(cls, n_workers: int, *, packets: float = 0.0) -> Self:
        """No bytes at all."""
        workers = np.zeros(n_workers)
        return cls(0.0, packets, 0.0, 0.0, workers, workers, workers, workers, workers)

    def rows_received(self, row_nbytes: int) -> float:
        """Number of rows that workers receive from other participants."""
        return float(self.worker_in.sum()) / (row_nbytes + CHECKSUM_NBYTES)


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
    n, q = cluster.n_workers, work.n_samples
    if q < n:
        raise InvalidParameter.of("n_samples", q, f"an integer >= {n}", "There are fewer samples than workers.")
    rows = work.lacking(n)
    if not work.choices.assignment.moves or not rows:
        return Loads.none(n)
    excess, delivery = work.excess(n), work.delivery
    check_delivery(delivery.name, n, excess=excess > 0)
    if delivery.reads_store and cluster.storage is None:
        raise InvalidParameter.of("storage", None, f"bytes a second for the delivery {delivery.name!r}")
    counted = min(n, MOST_WORKERS)
    like, small = q, work
    if n > counted:
        # The same share of each worker; where workers code in pairs, the same number of rows for each pair.
        like = math.ceil(q * (counted / n) ** (2 if delivery.coded and not excess else 1))
        fraction = None if not excess else 1 / counted + excess * (1 - 1 / counted)
        small = work.with_choices(cache_fraction=fraction)
    least = LEAST_CHUNKS * counted * work.group_rows if work.in_chunks else 1
    planned = min(max(like, counted), max(most_samples, least))
    small = dataclasses.replace(small, n_samples=planned)
    plan, needed = _planned(small, counted)
    if excess and delivery.coded and plan.n_packets > needed / 2:  # too few samples to see how many a packet combines
        small = dataclasses.replace(small, n_samples=(planned := max(planned, min(like, MOST_SAMPLES))))
        plan, needed = _planned(small, counted)
    growth = q / planned if n == counted else rows / n / (small.lacking(counted) / counted)
    more, times = n / counted, growth * n / counted
    if not plan.n_components:
        return dataclasses.replace(Loads.none(n, packets=plan.n_packets * times), needed=needed * times)
    fewer = _fewer(small, counted, like, plan.n_packets / needed) if delivery.coded and planned < like else 1.0
    loads = _counted(work, plan, counted, planned, growth, fewer)
    changes: dict[str, Any] = {
        name: getattr(loads, name) * more for name in ("packets", "server_out", "encoded", "needed_nbytes")
    }
    for name in ("worker_out", "worker_in", "decoded", "read", "requests"):
        each = getattr(loads, name)
        # By chance, workers differ the less the more samples or chunks they get.
        changes[name] = np.resize(each.mean() + (each - each.mean()) / math.sqrt(max(1.0, growth)), n)
    return dataclasses.replace(loads, needed=needed * times, **changes)


def _counted(work: Work, plan: Packets, n: int, planned: int, growth: float, fewer: float) -> Loads:
    """Count the loads of a job in its plan for n workers and as many samples as were planned."""
    # growth: rows that a worker receives in the job, for each row in the plan.
    # fewer: packets for each sample in the job, divided by those in the plan.
    delivery, relay, row_nbytes = work.delivery, work.choices.relay, work.row_nbytes
    packets = float(plan.n_packets) * fewer
    loads = Loads.none(n, packets=packets * growth)
    received = np.bincount(plan.destinations, minlength=n).astype(np.float64)
    if delivery.reads_store:
        # A worker reads each chunk once. For single samples of a larger job, their number is estimated.
        q, c = planned, work.chunk_rows
        n_chunks = -(-q // c)
        hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
        lengths = np.where(hit % n_chunks == n_chunks - 1, q - (n_chunks - 1) * c, c)
        read = np.bincount(hit // n_chunks, lengths, minlength=n) * (growth * row_nbytes)
        hits = np.bincount(hit // n_chunks, minlength=n).astype(np.float64) * growth
        if planned < work.n_samples and not work.in_chunks:
            q, c = work.n_samples, min(work.chunk_rows, work.n_samples)
            hits = np.array([_chunks_hit(q, c, rows) for rows in (received * growth).tolist()])
            read = hits * c * row_nbytes
        needed_nbytes = float((received * growth).sum()) * row_nbytes
        return dataclasses.replace(loads, requests=hits, read=read, needed_nbytes=needed_nbytes)
    row, senders = (row_nbytes + CHECKSUM_NBYTES) * growth, plan.senders
    if delivery.coded:
        hops = route(relay, plan, n, BATCH)
        senders, rows = hops.senders, float(plan.n_components)
        decoded = np.bincount(plan.destinations, np.diff(plan.offsets)[hops.packets], minlength=n) / fewer
        # The second stage of a ring takes ``(U - P) / n`` if the rings of all groups keep all links busy, and
        # ``P (m - 1) / m`` if one group follows the other (Chung et al. (2017), Theorem 4; see docs/papers.md, for a
        # single group of m workers). Measured durations are between the two.
        ring = min(RING_WAITS * (rows - packets) / n, packets * (1 - packets / rows)) if relay == "ring" else 0.0
        loads = dataclasses.replace(
            loads, decoded=decoded * growth * row_nbytes, encoded=rows * growth * row_nbytes, passed_on=ring * row
        )
    sent = float(np.count_nonzero(senders == SERVER)) * (1.0 if relay == "unicast" else fewer)
    away = np.bincount(senders[senders >= 0], minlength=n).astype(np.float64)
    factor = (plan.n_components - sent) / away.sum() if away.any() else 0.0
    return dataclasses.replace(loads, server_out=sent * row, worker_in=received * row, worker_out=away * (factor * row))


def _chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Expected number of distinct chunks that contain ``n_rows`` samples drawn at random without replacement."""
    # A chunk of c samples contains none of r samples out of q with probability of about ``(1 - r / q) ** c``.
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def first_load(work: Work, cluster: ClusterRates) -> Loads:
    """Loads of loading the first partitions: every chunk is read once, for all workers that hold its rows."""
    # Nothing is sent if all rows of a chunk go to one worker.
    n, row_nbytes = cluster.n_workers, work.row_nbytes
    whole = work.in_chunks or work.choices.sharding == "contiguous" or work.chunk_rows == 1
    sent = 0.0
    if work.excess(n) > 0 or not whole:
        sent = work.alpha(n) * work.n_samples * (1 - 1 / n) * (row_nbytes + CHECKSUM_NBYTES)
    moved, each = np.full(n, sent), np.full(n, work.n_samples * row_nbytes / n)
    requests = np.full(n, math.ceil(work.n_samples / min(work.chunk_rows, work.n_samples)) / n)
    loads = dataclasses.replace(Loads.none(n), needed=work.n_samples, worker_out=moved, worker_in=moved)
    return dataclasses.replace(loads, read=each, requests=requests, needed_nbytes=float(each.sum()))


def _fewer(work: Work, n_workers: int, n_samples: int, per_sample: float) -> float:
    """Packets for each sample of a job of ``n_samples``, divided by those of the plan of ``work``."""
    # What is above the bound of Chung et al. (2017), Theorem 2, falls with each factor of :data:`STEP` as it fell from
    # a plan of fewer samples.
    fewest = work.n_samples // STEP
    plan, needed = _planned(dataclasses.replace(work, n_samples=fewest), n_workers)
    alpha = work.alpha(n_workers)
    bound = coded_rate(work.n_samples, n_workers, max(-(-work.n_samples // n_workers), int(alpha * work.n_samples)))
    least = bound / (work.n_samples * (1 - alpha))
    before, above = plan.n_packets / max(1, needed) - least, per_sample - least
    if not before > above > 0:
        return 1.0
    steps = math.log(n_samples / work.n_samples, STEP)
    return float(least + above * (above / before) ** steps) / per_sample


@functools.lru_cache(maxsize=4)  # relays and rates do not change it
def _packets_of(n_samples: int, n_workers: int, choices: Choices) -> tuple[Packets, int]:
    # The previous epoch is the same for all deliveries.
    before = _epoch_before(n_samples, n_workers, dataclasses.replace(choices, delivery="storage"))
    planner = copy.deepcopy(before)
    planner.spec.with_choices(delivery=choices.delivery)  # raises if it is not allowed
    epoch = planner.advance(choices.delivery)
    return epoch.packets, epoch.n_needed


def _planned(work: Work, n_workers: int) -> tuple[Packets, int]:
    """The plan of an epoch, and the number of samples that it delivers."""
    assignment, chosen = work.choices.assignment.with_unit(work.group_rows), work.choices
    choices = Choices(assignment, chosen.delivery, chosen.caching, chosen.cache_fraction)
    return _packets_of(work.n_samples, n_workers, choices)


@functools.lru_cache(maxsize=6)
def _epoch_before(n_samples: int, n_workers: int, choices: Choices) -> EpochPlanner:
    """A planner at the epoch before the one to plan; if there are few samples, before a typical one."""
    planner = EpochPlanner(ShuffleSpec(n_samples, n_workers, choices), checks=False)
    planner.load()
    for _ in range(1, FIRST_EPOCH):
        planner.advance()
    assignment = choices.assignment
    if n_samples < FEW_UNITS * ((assignment.in_chunks and assignment.unit) or 1):
        for _ in range(_typical_epoch(copy.deepcopy(planner))):
            planner.advance()
    return planner


def _typical_epoch(planner: EpochPlanner) -> int:
    """Which of the next epochs is typical in two numbers: samples that are needed, and that one worker lacks."""
    lacking = []
    for _ in range(EPOCHS_OF_FEW):
        epoch = planner.advance()
        lacking.append([epoch.n_needed, int(np.bincount(epoch.packets.destinations).max(initial=0))])
    middle = np.maximum(1, np.median(lacking, axis=0))
    return int(np.abs(np.array(lacking) / middle - 1).sum(axis=1).argmin())


@functools.lru_cache(maxsize=256)  # called again for every scaled cluster
def _batch_sizes(packets: int, n_workers: int, row_nbytes: int) -> NDArray[np.int64]:
    """The sizes of a worker's batches."""
    return np.array(batch_sizes(packets, n_workers, row_nbytes))


def pair_count(work: Work, n: int) -> int:
    """Number of pairs of participants of which the first sends rows to the second."""
    delivery = work.delivery
    if delivery.needs_server:  # it sends to every worker; as relays, workers send to each other
        return n * n if delivery.coded and work.choices.relay != "unicast" else n
    return 0 if delivery.reads_store else n * (n - 1)


def message_count(work: Work, loads: Loads, rate: float = math.inf) -> float:
    """Estimate the number of messages between all participants, on links of a rate (bytes per second)."""
    if not loads.worker_in.any():
        return 0.0
    delivery, relay, row_nbytes, n = work.delivery, work.choices.relay, work.row_nbytes, len(loads.worker_in)
    rows, packets = loads.rows_received(row_nbytes), round(loads.packets)
    if not delivery.coded:  # those of a server are full
        pacing = Pacing.of(
            math.inf if delivery.needs_server else rate, message_bytes=MESSAGE_BYTES, window_bytes=WINDOW_BYTES
        )
        pairs, full = pair_count(work, n), max(1, pacing.message_nbytes // row_nbytes)
        return min(rows, float(pairs * max(1, math.ceil(round(rows / pairs) / full))))
    if relay == "pipelined":  # it forwards each batch in one message to each of the other workers
        sizes = _batch_sizes(packets, n, row_nbytes)
        # Probability that another worker needs a packet. A batch without one is not sent to it.
        probability = min(1.0, (rows / packets - 1) / max(1, n - 1))
        return min(rows, n * len(sizes) + n * (n - 1) * float((1 - (1 - probability) ** sizes).sum()))
    batches = rows / packets_per_batch(packets, n, row_nbytes)
    if relay == "unicast":
        return max(float(min(n, rows)), batches)
    # In a ring, a worker sends one message to each of the others in every round but the last.
    rounds = float(loads.worker_in.sum()) / loads.server_out - 1
    return min(rows, n * (1 + (n - 1) * rounds) + batches)


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
    messages = _messages(work, cluster, loads)
    ends = 1 / cluster.send_rate + 1 / cluster.receive_rate
    return float(loads.worker_in.sum()) / messages * ends if messages else 0.0


def first_messages(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    """Estimate the number of messages that are the first ones from their sender to their receiver."""
    return min(_messages(work, cluster, loads), float(pair_count(work, cluster.n_workers)))


def _messages(work: Work, cluster: ClusterRates, loads: Loads) -> float:
    return message_count(work, loads, float(np.median(cluster.rates("link_down"))))


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
    """Compute times from loads; docs/design.md, "Predicting", has the formulas."""
    # Links and storage work at the same time, so the slowest one determines the time. There are three exceptions.
    # Relays pass on a batch of packets once all of it has arrived. Workers that read the most share the storage with
    # all others at first, but only their own links limit them in the end. The first message is packed before links are
    # busy, and the last one is unpacked after that.
    # Processors are shared by all of this, and their time overlaps less with that of the network. The two times are
    # combined as the cube root of the sum of their cubes. We fitted the exponent 3.
    resources, exchange = _exchange(cluster, work, loads)
    first = work.with_choices(delivery=SIMPLEST), first_load(work, cluster)
    load_seconds = None if cluster.storage is None else _exchange(cluster, *first)[1]
    training, every = work.training_seconds or 0.0, work.choices.every
    read = float(loads.read.sum())
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
        storage_bytes=read,
        most_ingress=float((loads.worker_in + (loads.read if cluster.storage_over_links else 0.0)).max()),
        requests=float(loads.requests.sum()),
        read_amplification=read / loads.needed_nbytes if loads.needed_nbytes else 1.0,
    )


def _exchange(cluster: ClusterRates, work: Work, loads: Loads) -> tuple[dict[str, float], float]:
    """How long each part of the cluster is busy, and how long all of it takes."""
    n, wire = cluster.n_workers, 1 + cluster.wire_overhead
    up, down, served = cluster.rates("link_up"), cluster.rates("link_down"), loads.server_out
    if cluster.storage_client is not None and not loads.worker_in.any():
        down = np.maximum(down, cluster.storage_client)  # a worker that only reads is not slowed by sending
    if cluster.server_up is None and served:
        # The first worker serves: its own rows stay off the network, and what it relays leaves by the same link.
        served = served * (1 - 1 / n) + float(loads.worker_out[0])
    firsts = first_messages(work, cluster, loads)
    entering = loads.worker_in + (loads.read if cluster.storage_over_links else 0.0)
    busy = {
        "server egress": served * wire / (float(up[0]) if cluster.server_up is None else cluster.server_up),
        "worker ingress": float((entering / down).max()) * wire,
        "worker egress": float((loads.worker_out / up).max()) * wire,
        PROCESSORS: _processor_seconds(cluster, work, loads, firsts),
    }
    if loads.passed_on:
        slowest = float(np.minimum(up, down).min())
        busy["scatter, then ring"] = busy.pop("server egress") + loads.passed_on * wire / slowest
    if cluster.storage is not None:
        waiting = loads.requests * cluster.request_seconds
        if cluster.storage_connection is not None:
            waiting = waiting + loads.read / cluster.storage_connection
        answered = float(loads.requests.sum()) / cluster.storage_requests
        busy["storage"] = float(loads.read.sum()) / cluster.storage
        busy["storage requests"] = max(float(waiting.max()) / REQUESTS_AT_ONCE, answered)
        if cluster.storage_client is not None:
            busy["storage for one worker"] = float(loads.read.max()) / cluster.storage_client
    busy = {name: seconds for name, seconds in busy.items() if seconds > 0}
    if not busy:
        return busy, 0.0
    links = max((seconds for name, seconds in busy.items() if name != PROCESSORS), default=0.0)
    relayed = relayed_seconds(work, cluster, loads, busy.get("server egress", 0.0))
    links = max(links, _reading_seconds(cluster, loads), relayed) + ends_seconds(work, cluster, loads)
    together = float(np.cbrt(links**3 + busy.get(PROCESSORS, 0.0) ** 3))
    # The order, votes, and first messages do not depend on how much moves.
    per_processor = firsts / n * max(1.0, cluster.machine_workers / cluster.cores)
    busy[FIXED] = cluster.epoch_seconds + per_processor * (cluster.first_message_seconds or 0.0)
    return busy, together + busy[FIXED]


def _reading_seconds(cluster: ClusterRates, loads: Loads) -> float:
    """Time until all workers have read, if active readers share the storage equally up to the rate of their links."""
    # Returns 0 if links differ. The limits of each link and of the storage then determine the time.
    if cluster.storage is None or not loads.read.any():
        return 0.0
    links = cluster.rates("link_down") / (1 + cluster.wire_overhead) if cluster.storage_over_links else math.inf
    own = cluster.storage_client or float(np.min(links))
    if own < np.max(links) and cluster.storage_client is None:
        return 0.0
    each = np.minimum(own, cluster.storage / np.arange(cluster.n_workers, 0, -1))
    return float((np.diff(np.sort(loads.read), prepend=0.0) / each).sum())


def _processor_seconds(cluster: ClusterRates, work: Work, loads: Loads, firsts: float) -> float:
    """Processor time of the busiest machine divided by its number of processors."""
    # It is at least the time of the busiest process, because each process has one network thread.
    messages = _messages(work, cluster, loads) - (0.0 if cluster.first_message_seconds is None else firsts)
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


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job costs, in the currency of the price.

    Parameters
    ----------
    load
        Loading the samples of the first epoch from the store.
    epoch
        Any later epoch, on average.
    run
        All epochs; None if their number is unknown.
    """

    load: float
    epoch: float
    run: float | None

    @classmethod
    def of(cls, egress_price: float, prediction: Prediction, cluster: ClusterRates, epochs: int | None = None) -> Self:
        """The bill of a job, from the price of a gigabyte (1e9 bytes) that leaves the store or the server.

        What a server reads is not in it, nor what is read again after a fault.

        Raises
        ------
        InvalidParameter
            If the price is not a finite number of at least 0.

        Examples
        --------
        >>> from dshuffle.planning import Choices
        >>> from dshuffle.planning.cost import ClusterRates, Work, predict
        >>> cluster = ClusterRates(4, link_up=1e8, link_down=1e8, server_up=1e8)
        >>> work = Work(1_000_000, 1000, Choices("global", "server", every=2), chunk_rows=100)
        >>> bill = Bill.of(0.1, predict(cluster, work), cluster, epochs=11)
        >>> round(bill.load, 2), round(bill.epoch, 3), round(bill.run, 2)
        (0.1, 0.038, 0.48)
        """
        price = as_number("egress_price", egress_price, 0.0) / 1e9
        exchange = price * (prediction.server_egress + prediction.storage_bytes)
        load = price * float(first_load(prediction.work, cluster).read.sum())
        epochs_with_one = None if epochs is None else len(prediction.work.choices.exchange_epochs.after(0, epochs - 1))
        run = None if epochs_with_one is None else load + exchange * epochs_with_one
        return cls(load, exchange / prediction.work.choices.every, run)

    def to_dict(self) -> dict[str, float | None]:
        """The amounts by name, as JSON can hold them."""
        return {f"price_of_{name}": value for name, value in dataclasses.asdict(self).items()}


ASSIGNMENTS = ("local", "partial:0.1", "global", "aligned", "chunks")
SAMPLES = 100_000
"""Most samples of a plan made to compare ways. Fewer than in :func:`predict`, because many plans are made."""
EQUALLY = 0.02
"""Relative tolerance for equal times."""
FACTORS = np.geomspace(1 / 256, 256, 17)
"""Factors by which rates are scaled to find out what would change the recommendation."""

Candidate = tuple[Work, Loads]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the cluster that would make another way the fastest.

    Parameters
    ----------
    what
        Scaled part of the cluster: a key of :data:`~dshuffle.planning.cost.SCALABLE`.
    factor
        Changed rate divided by the present rate.
    winner
        Prediction for the fastest way on the changed cluster.
    """

    what: str
    factor: float
    winner: Prediction


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended way of shuffling, and why.

    Parameters
    ----------
    best
        Fastest way to shuffle globally.
    instead
        Way that shuffles less, if training does not hide ``best`` but hides this one. None if training hides
        ``best``, or if the training time is unknown.
    whole_chunks
        Way that moves whole chunks, if it is faster than ``best``; otherwise None.
    verdict, reason
        One sentence each.
    notes
        Further sentences.
    changes
        For each part of the cluster, the smallest slowdown and the smallest speed-up that would make another way the
        fastest.
    predictions
        Those of all ways, in their order.
    """

    best: Prediction
    instead: Prediction | None
    whole_chunks: Prediction | None
    verdict: str
    reason: str
    notes: tuple[str, ...]
    changes: tuple[Change, ...]
    predictions: tuple[Prediction, ...]


def all_ways(
    cluster: ClusterRates, work: Work, *, assignments: Sequence[str] = ASSIGNMENTS, server: bool = True
) -> tuple[Work, ...]:
    """List every way of doing the work that the cluster and the caches allow.

    Parameters
    ----------
    work
        Its assignment, delivery, relay and caching are ignored.
    server
        Whether to include ways that need a server.

    Examples
    --------
    >>> cluster = ClusterRates(4, link_up=1e9, link_down=1e9)
    >>> [way.way for way in all_ways(cluster, Work(1000, 64), assignments=["local", "partial:0.1"])][:4]
    ['local', 'partial:0.1 + peer', 'partial:0.1 + server', 'partial:0.1 + leftover, pipelined']
    """
    ways: list[Work] = []
    n, excess = cluster.n_workers, work.excess(cluster.n_workers) > 0
    suitable = suitable_deliveries(n, excess=excess, has_server=server, has_storage=cluster.storage is not None)
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

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6)
    >>> ways = all_ways(cluster, Work(100_000, 1024), assignments=["global"])
    >>> best = min(compare_costs(cluster, ways), key=lambda p: p.exchange_seconds)
    >>> best.work.way
    'global + peer'
    """
    return [timed(cluster, *candidate) for candidate in _candidates(cluster, ways)]


def _candidates(cluster: ClusterRates, ways: Sequence[Work]) -> list[Candidate]:
    return [(way, loads_of(cluster, way, most_samples=SAMPLES)) for way in ways]


def recommend(cluster: ClusterRates, ways: Sequence[Work]) -> Recommendation:
    """Recommend the fastest way to shuffle globally, with reasons and what would change the recommendation.

    Parameters
    ----------
    ways
        Candidate ways for one job (see :func:`all_ways`). At least one must shuffle globally. Others (``local``,
        ``partial:Q``, ``chunks``) are compared with the best of these.

    Raises
    ------
    InvalidParameter
        If no way shuffles globally.

    Examples
    --------
    >>> cluster = ClusterRates(8, link_up=12.5e6, link_down=12.5e6, storage=50e6, storage_over_links=False)
    >>> advice = recommend(cluster, all_ways(cluster, Work(100_000, 1024)))
    >>> advice.verdict, [(change.what, change.winner.work.delivery.name) for change in advice.changes]
    ('Use global + peer: 948 ms per epoch.', [('links', 'storage'), ('storage', 'storage')])
    """
    candidates = _candidates(cluster, ways)
    shuffling = [candidate for candidate in candidates if candidate[0].choices.assignment.redraws_all]
    if not shuffling:
        raise InvalidParameter.of("ways", [way.way for way in ways], "a list with a 'global' or 'aligned' way")
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    best = _fastest(cluster, shuffling)
    took = best.exchange_seconds
    whole = min((p for p in predictions if p.work.in_chunks), key=_took, default=None)
    if whole is not None and (not took or whole.exchange_seconds * (1 + EQUALLY) > took):
        whole = None
    training, instead = best.work.training_seconds, None
    pace = f"{human_seconds(took)} per {'epoch' if best.work.choices.every == 1 else 'exchange'}"
    verdict, notes = f"Use {best.work.way}: {pace}.", []
    if training is not None and took <= training:
        notes.append(f"The exchange is hidden behind {human_seconds(training)} of training.")
    elif training is not None:
        parts = [p for p in predictions if _exchanges_part(p.work)]
        hidden = [p for p in predictions if not p.work.choices.assignment.moves] + parts
        fits = [p for p in hidden if p.exchange_seconds <= training]
        # Of those that training hides, the way that shuffles the most.
        instead = min(fits, key=lambda p: (-p.work.fraction, p.exchange_seconds), default=None)
        if instead is not None:
            verdict = (
                f"Do not shuffle globally: the fastest way ({best.work.way}) takes {pace}, but training takes only "
                f"{human_seconds(training)}. Use {instead.work.way} ({human_seconds(instead.exchange_seconds)})."
            )
        else:
            notes.append(f"The exchange takes longer than training ({human_seconds(training)}).")
        sent = min((p for p in parts if p.exchange_seconds and not p.storage_bytes), key=_took, default=None)
        if sent is not None and 0.001 <= (fraction := sent.work.fraction * training / sent.exchange_seconds) < 1:
            notes.append(f"Training can hide the exchange of up to partial:{fraction:.2g}.")
    if whole is not None:
        notes.append(
            f"Moving whole chunks ({whole.work.way}) takes {human_seconds(whole.exchange_seconds)}. It mixes less, as "
            "their rows stay together."
        )
    read = next((p for p in predictions if p.work.choices.assignment.redraws_all and p.storage_bytes), None)
    if read is not None and read.read_amplification > 1 + EQUALLY and not best.storage_bytes:
        [single] = compare_costs(cluster, [dataclasses.replace(read.work, chunk_rows=1)])
        notes.append(f"With one row per chunk, re-reading would take {human_seconds(single.exchange_seconds)}.")
    changes, reason = _changes(cluster, shuffling, best), _reason(best, predictions)
    return Recommendation(best, instead, whole, verdict, reason, tuple(notes), changes, tuple(predictions))


def _took(prediction: Prediction) -> float:
    return prediction.exchange_seconds


def _exchanges_part(work: Work) -> bool:
    """Whether every worker exchanges a part of its samples, one by one."""
    rule = work.choices.assignment
    return rule.moves and not (rule.redraws_all or rule.in_chunks or rule.needs_holders)


def _reason(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """What limits the best way, and the fastest one of each other family."""
    took, families = best.exchange_seconds, {best.work.delivery.family}
    sentences = [f"{best.work.delivery.name}: {_limit(best)}"]
    for p in sorted(predictions, key=_took):
        if p.work.choices.assignment.redraws_all and p.work.delivery.family not in families:
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


def _fastest(cluster: ClusterRates, candidates: Sequence[Candidate]) -> Prediction:
    """Return the first candidate whose time is about the least; candidates are ordered from simple to complex."""
    predictions = [timed(cluster, *candidate) for candidate in candidates]
    least = min(map(_took, predictions))
    return next(p for p in predictions if p.exchange_seconds <= least * (1 + EQUALLY))


def _changes(cluster: ClusterRates, candidates: Sequence[Candidate], best: Prediction) -> tuple[Change, ...]:
    """Find, for each scalable part, the factors nearest to 1, below and above, at which another way wins."""
    changes = []
    for what, rates in SCALABLE.items():
        if all(getattr(cluster, rate) in (None, math.inf) for rate in rates):
            continue
        for factors in (FACTORS[FACTORS < 1][::-1], FACTORS[FACTORS > 1]):
            near = 1.0
            for far in factors.tolist():
                other = _fastest(cluster.scaled(what, far), candidates)
                if other.work.way == best.work.way:
                    near = far
                    continue
                while max(near / far, far / near) > 1.01:
                    middle = (near * far) ** 0.5
                    at_middle = _fastest(cluster.scaled(what, middle), candidates)
                    if at_middle.work.way == best.work.way:
                        near = middle
                    else:
                        far, other = middle, at_middle
                changes.append(Change(what, far, other))
                break
    return tuple(changes)
