"""Tasks that run on workers during a measurement: send bytes to each other, read chunks, run kernels."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.coding import decode, encode
from dshuffle.exchange.buffers import Buffer, BufferPool
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import probe, sent
from dshuffle.exchange.messages import MIB, MessageId
from dshuffle.exchange.replies import RowsReply
from dshuffle.exchange.shared_memory import may_share
from dshuffle.exchange.warmup import warm_up
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.rows import ByteMatrix, RowLayout, checksum_rows
from dshuffle.runtime.dataset_inputs import unit_rows
from dshuffle.runtime.processors import ProcessorTimes
from dshuffle.store import Dataset

HANDLER = "dshuffle_probe"
MESSAGE_BYTES = 4 * MIB
WINDOW = 4
"""Number of messages that a worker requests at once."""
LEAST_BYTES = MIB // 2
"""Size of the first request and of requests on slow links. With less, long queues make this measure round trips, not
the rate."""
READ_BYTES = 64 * MIB
"""Maximum bytes of rows to read in one call."""
READ_GROWTH = 16
"""How much longer than the one before a call may be. The store may serve its first bytes faster than others."""
HERE = uuid.uuid4().hex
"""Identifies this process together with its PID, because containers on one machine may use the same PIDs."""
KERNEL_BYTES = 16 * MIB
"""Bytes of rows for the kernels: more than processor caches hold."""
KERNEL_ROWS = 2**18
"""Most rows for the kernels. More short ones take as long each."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and process of a worker, and their processor time so far.

    Parameters
    ----------
    name
        Name of the machine. Workers that share processors have the same name, even in different networks.
    cores
        Number of processors that the worker may use.
    busy_seconds, own_seconds
        Processor time of the whole machine, including the kernel's network stack, and of this process.
    process
        Unique name of the process. Several workers may run as threads of one process.
    """

    name: str
    cores: int
    process: str
    busy_seconds: float
    own_seconds: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes received or read by one worker, the seconds that they take, and the number of messages."""

    nbytes: int
    seconds: float
    messages: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a partition and the codes take on one processor.

    Parameters
    ----------
    gather, scatter
        Bytes of rows per second that a partition packs, and that it verifies and unpacks.
    encode, decode
        Bytes of rows per second that are read to encode packets, and to decode them.
    index_seconds
        Seconds per row held, to make the next index of a partition and the digests of a vote.
    """

    gather: float
    scatter: float
    encode: float
    decode: float
    index_seconds: float


_opened: dict[str, tuple[Dataset, ByteMatrix]] = {}
"""Open datasets by the name of the probe, each with memory for its rows. Many workers that open one at once take
seconds, which are not read time, and a partition is in memory, too."""


async def install(dask_worker: Worker) -> None:
    """Let a worker answer probes."""
    layout = RowLayout.of({"x": (np.dtype("u1"), (MESSAGE_BYTES,))})
    message = MessageId(0, 0, 0, 0)

    async def give(nbytes: int, host: str) -> dict[str, Any]:
        await _through_a_thread(time.perf_counter)  # real messages are packed in a thread, too
        payload = mapped if may_share(host) else copied
        place = None if payload.place is None else payload.place._replace(row_nbytes=nbytes)
        return await sent(dask_worker, RowsReply(payload.rows[:, :nbytes], payload.checksums, place=place))

    pool = BufferPool(layout, 1, 1)
    mapped, copied = pool.take(message, 1, shared=True), Buffer.new(layout, 1)
    for payload in (mapped, copied):
        payload.rows[:] = np.random.default_rng(0).integers(0, 256, MESSAGE_BYTES, dtype=np.uint8)

    dask_worker.handlers[HANDLER] = give


async def remove(name: str, dask_worker: Worker) -> None:
    """Undo :func:`install` and :func:`keep`."""
    dask_worker.handlers.pop(HANDLER, None)
    _opened.pop(name, None)


def keep(name: str, dataset: Dataset) -> None:
    """Keep a dataset for the tasks of a probe.

    Unpickling has opened it. Reading some chunks connects to its storage, and loads code: numba alone takes a second,
    which would otherwise be counted as time of the storage.
    """
    chunk_rows = min(unit_rows(dataset), dataset.n_samples)
    most = max(1, READ_BYTES // max(1, chunk_rows * dataset.row_nbytes))
    rows = dataset.layout.empty(min(dataset.n_samples, most * chunk_rows))
    rows[:] = 0
    _opened[name] = dataset, rows
    read_chunks(name, seconds=0.001, seed=0)


def machine() -> Machine:
    """Describe the machine of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers and network namespaces of a machine
    name = boot.read_text().strip() if boot.exists() else os.uname().nodename
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(name, cores, f"{HERE}-{os.getpid()}", ProcessorTimes.now().used, time.process_time())


async def where(dask_worker: Worker) -> Machine:
    """Call :func:`machine` on a worker."""
    return machine()


async def connect(dask_worker: Worker, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """Open the connections for :func:`pull`. A handshake costs more processor time than a message."""
    peers = [address for address in senders if address != dask_worker.address]
    if dask_worker.address in receivers and peers:
        at_once = -(-WINDOW // len(peers))
        probes = [probe(dask_worker, other, 1, shares_memory=False) for other in peers for _ in range(at_once)]
        await asyncio.gather(*probes)


async def pull(
    dask_worker: Worker, senders: Sequence[str], receivers: Sequence[str], seconds: float, shares_memory: bool
) -> Traffic:
    """Fetch from all senders in turn for some seconds, if this worker is one of the receivers.

    Each receiver starts with a different sender, so that all senders are busy from the start.
    """
    own_address = dask_worker.address
    peers = [address for address in senders if address != own_address]
    if own_address not in receivers or not peers:
        return Traffic(0, 0.0)
    at = list(receivers).index(own_address) % len(peers)
    peers = peers[at:] + peers[:at]
    began = time.perf_counter()
    total = turn = messages = 0

    # If many receivers ask one sender, full first messages would take seconds on a slow link.
    first = LEAST_BYTES * len(peers) // max(len(receivers), len(peers))

    async def keep_asking() -> None:
        nonlocal total, turn, messages
        nbytes = first
        while (start := time.perf_counter()) - began < seconds:
            other = peers[turn % len(peers)]
            turn += 1
            arrived = await probe(dask_worker, other, nbytes, shares_memory=shares_memory)
            await _through_a_thread(_touch, arrived)  # mapped pages take time only when they are read
            total += arrived.nbytes
            messages += 1
            nbytes = _next_size(nbytes, time.perf_counter() - start, seconds, first, MESSAGE_BYTES)

    await asyncio.gather(*(keep_asking() for _ in range(WINDOW)))
    return Traffic(total, time.perf_counter() - began, messages)


def read_chunks(name: str, seconds: float, seed: int) -> Traffic:
    """Read whole chunks in order from a random start, each at most once, for some seconds or until all are read.

    The delivery ``"storage"`` reads in the same way: if chunks have more rows than there are workers, it reads nearly
    all chunks, in order and in one call. So the calls here are long, too. The first one is short and tells how many
    bytes can be read. The rate is that of the others, because a short call mostly waits for its slowest request.

    Returns
    -------
    Traffic
        All bytes that were read, and the seconds that they take in long calls.
    """
    dataset, rows = _opened[name]
    chunk_rows = min(unit_rows(dataset), dataset.n_samples)
    chunk_nbytes = max(1, chunk_rows * dataset.row_nbytes)
    n_chunks = -(-dataset.n_samples // chunk_rows)
    order = (np.arange(n_chunks) + np.random.default_rng(seed).integers(n_chunks)) % n_chunks
    nbytes, calls, first = LEAST_BYTES, list[tuple[int, float]](), 0
    began = time.perf_counter()
    while first < len(order) and (start := time.perf_counter()) - began < seconds:
        chunks = order[first : first + max(1, nbytes // chunk_nbytes)]
        ids = _rows_of(chunks, chunk_rows, dataset.n_samples)
        dataset.read_into(rows, np.arange(len(ids)), ids)
        end = time.perf_counter()
        calls.append((len(ids) * dataset.row_nbytes, end - start))
        first += len(chunks)
        in_time = int(calls[-1][0] / (end - start) * (began + seconds - end))
        nbytes = min(READ_BYTES, READ_GROWTH * max(LEAST_BYTES, calls[-1][0]), max(LEAST_BYTES, in_time))
    long_calls = calls[1:] or calls
    seconds_per_byte = math.fsum(call[1] for call in long_calls) / max(1, sum(call[0] for call in long_calls))
    total = sum(call[0] for call in calls)
    return Traffic(total, total * seconds_per_byte)


def request_seconds(name: str, seed: int, count: int = 8) -> float:
    """Median time to read a single row."""
    dataset, _ = _opened[name]
    ids = np.random.default_rng(seed).integers(0, dataset.n_samples, count)
    rows = dataset.layout.empty(1)
    times = []
    for sample in ids.tolist():
        began = time.perf_counter()
        dataset.read_into(rows, np.zeros(1, dtype=np.int64), np.array([sample]))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def kernels(row_nbytes: int) -> Kernels:
    """Time on one processor what an exchange does with rows of this length, and with packets of four of them."""
    row_nbytes = min(row_nbytes, KERNEL_BYTES // 8)  # rates are per byte, and longer rows would take much memory
    warm_up(row_nbytes, coded=True)
    layout = RowLayout.of({"x": (np.dtype("u1"), (row_nbytes,))})
    n_packets = min(KERNEL_ROWS, max(8, KERNEL_BYTES // max(1, row_nbytes))) // 4
    n = 4 * n_packets
    ids, arriving = np.arange(n), np.arange(n, 2 * n)
    partition = CachePartition(layout, capacity=n, incoming=n)
    partition.rows[:] = np.random.default_rng(0).integers(0, 256, row_nbytes, dtype=np.uint8)
    partition.add_checksums(ids, partition.reserve(ids))
    partition.commit(partition.prepare(ids))
    leaving = np.random.default_rng(0).permutation(n)
    message, message_sums = layout.empty(n), np.empty(n, dtype=np.uint32)
    message[:] = 0
    gather = _seconds(lambda: partition.pack(leaving, message, message_sums))
    slots, arriving_sums = partition.reserve(arriving), checksum_rows(message, arriving)

    def next_index() -> None:
        partition.reserve(arriving)
        partition.prepare(arriving)
        SampleDigest.of(leaving, 0)

    rows, sums = partition.rows[:n], partition.checksums[:n]
    members = leaving.reshape(n_packets, 4)
    packets, packet_sums = layout.empty(n_packets), np.empty(n_packets, dtype=np.uint32)
    packets[:] = 0
    four, three = np.arange(n_packets + 1) * 4, np.arange(n_packets + 1) * 3
    held, lacking, packet_numbers = members[:, :3].ravel(), members[:, 3].copy(), np.arange(n_packets)
    nbytes = n * row_nbytes
    return Kernels(
        gather=nbytes / gather,
        scatter=nbytes / _seconds(lambda: partition.unpack(arriving, slots, message, arriving_sums)),
        encode=nbytes / _seconds(lambda: encode(rows, sums, four, leaving, packet_numbers, packets, packet_sums)),
        decode=nbytes / _seconds(lambda: decode(rows, sums, packets, packet_sums, three, held, lacking, lacking)),
        index_seconds=_seconds(next_index) / n,
    )


async def _through_a_thread(call: Callable[..., object], *args: object) -> None:
    await asyncio.get_running_loop().run_in_executor(None, call, *args)


def _touch(array: NDArray[np.uint8]) -> None:
    array.ravel()[:: mmap.PAGESIZE].max()


def _next_size(nbytes: int, took: float, seconds: float, least: int, most: int) -> int:
    """Size of the next request: double it if the last answer was fast compared to the total time, else halve it."""
    return min(most, 2 * nbytes) if took < seconds / 4 else max(least, nbytes // 2)


def _seconds(function: Callable[[], object]) -> float:
    """Least processor time of three runs, in seconds. What others do on the processors meanwhile does not count."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return max(min(times), 1e-9)


def _rows_of(chunks: np.ndarray, chunk_rows: int, n_samples: int) -> np.ndarray:
    ids = (chunks[:, np.newaxis] * chunk_rows + np.arange(chunk_rows)).ravel()
    return ids[ids < n_samples]
