"""Load the kernels of an exchange, or compile them once per machine, before the first rows arrive."""

from __future__ import annotations

import numpy as np

from dshuffle.coding import encode
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.compile_once import compile_once
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.exchange.transports import transport_of
from dshuffle.planning import SERVER, Packets, ShuffleSpec
from dshuffle.planning.delivery.relay import route
from dshuffle.planning.small_plan import compile_planner
from dshuffle.rows import RowLayout, checksum_rows

ROW_NBYTES = 8, 12
"""Rows of whole words and other rows use different kernels."""


def load_exchange_kernels() -> None:
    """Load the kernels of uncoded exchanges, or compile them if no process of this host has."""
    with compile_once("exchanges"):
        for row_nbytes in ROW_NBYTES:
            warm_up(row_nbytes)


def load_session_kernels(spec: ShuffleSpec, row_nbytes: int) -> None:
    """Load the kernels that plan a session and decode its packets, or compile them if no process of this host has."""
    choices = spec.choices
    excess = " with excess" if spec.has_excess else ""
    lengths = transport_of(choices.delivery).coded_lengths(row_nbytes)
    rows = "".join(f", kernels for {nbytes}-byte rows" for nbytes in lengths)
    with compile_once(f"{choices.assignment.name} + {choices.delivery}{excess}{rows}"):
        for nbytes in lengths:
            warm_up(nbytes, coded=True)
        compile_planner(spec)


def warm_up(row_nbytes: int, *, coded: bool = False) -> None:
    """Exchange two rows within this process, so that all kernels are loaded.

    Parameters
    ----------
    row_nbytes
        Size of a row in bytes. Kernels are specialized by the widest word size that divides it.
    coded
        Whether to decode packets as well.
    """
    samples = np.arange(2)
    cache = CachePartition(RowLayout.of({"x": (np.dtype("u1"), (row_nbytes,))}), capacity=2, incoming=2)
    cache.rows[:] = 0
    cache.add_checksums(samples, cache.reserve(samples))
    cache.commit(cache.prepare(samples))
    rows, checksums = cache.rows[:2].copy(), cache.checksums[:2].copy()
    cache.unpack(samples, cache.reserve(samples), rows, checksums)
    if not coded:
        return
    # Rank 0 gets the XOR of samples 2 and 3, and sample 3 alone: it decodes sample 2 from two packets.
    plan = Packets(
        offsets=np.array([0, 2, 3]),
        samples=np.array([2, 3, 3]),
        destinations=np.array([0, 1, 0], dtype=np.int32),
        senders=np.full(2, SERVER, dtype=np.int32),
    )
    route("ring", plan, 2, 1)
    hops = route("pipelined", plan, 2, 1)
    part = CodedPart.of(plan, hops, 0, at_most=1)
    is_kept = np.ones(2, dtype=np.bool_)
    relay = PacketStore(cache.layout, part.leaving)
    decoder = PacketDecoder(cache, plan, hops.packets, part.arriving, is_kept, cache.reserve(np.array([2, 3])), relay)
    packet = np.zeros((2, row_nbytes), dtype=np.uint8)  # all rows are zero
    of_2, of_3 = checksum_rows(packet, np.array([2, 3]))
    encode(packet, checksums, np.array([0, 2]), samples, np.zeros(1, dtype=np.int64), rows[:1], checksums[:1])
    for item, sample in enumerate(plan.samples[part.arriving].tolist()):
        checksum = np.array([of_3 if sample == 3 else of_2 ^ of_3], dtype=np.uint32)
        decoder.unpack(item, item + 1, packet[:1], checksum)
