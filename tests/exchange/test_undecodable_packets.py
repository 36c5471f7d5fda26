"""Plans that a rank cannot decode are refused, and a store of packets keeps what is passed on."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.errors import ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.transports import PacketDecoder, PacketStore, coded_part
from dshuffle.planning import Packets
from dshuffle.planning.delivery.relay import route
from dshuffle.rows import RowLayout

from .coded_world import packets_of


def decoder_of(plan: Packets, *held: int) -> PacketDecoder:
    """The decoder of rank 0, which holds these samples and wants all that comes in."""
    cache = CachePartition(RowLayout.of({"x": (np.dtype("f8"), ())}), capacity=9, incoming=99)
    cache.reserve(np.array(held, np.int64))
    cache.commit(cache.prepare(np.array(held, np.int64)))
    hops = route("unicast", plan, 2, 9)
    arriving = coded_part(plan, hops, 0, at_most=9)[1][0]
    slots = cache.reserve(plan.samples[arriving])
    wanted = np.ones(len(arriving), np.bool_)
    return PacketDecoder(cache, plan, hops.packets, arriving, wanted, slots, PacketStore(cache.layout, arriving[:0]))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "plan",
    [
        packets_of([(0, 0), (1, 0)]),
        packets_of([(0, 0), (0, 1)]),
        packets_of([(0, 0), (1, 1)], [(1, 0), (0, 1)]),
        packets_of([(0, 0), (1, 1)], [(1, 0), (2, 1)], [(2, 0), (0, 1)]),
        packets_of([(4, 0), (0, 1)], [(0, 0), (1, 1)], [(1, 0), (0, 1)], [(5, 0)]),
        packets_of([(0, 0), (1, 1), (2, 1)], [(1, 0), (0, 1), (2, 1)], [(2, 0), (0, 1), (1, 1)]),
        packets_of(*[[(i, 0), *((k, 1) for k in range(40) if k != i)] for i in range(40)]),
    ],
    ids=str,
)
def test_packets_that_need_each_other_are_refused(plan: Packets) -> None:
    with pytest.raises(ExchangeError, match="each of which can be decoded only after another"):
        decoder_of(plan)
