"""Short exchanges: what takes time whatever is moved, and the ends of the first and the last message."""

import numpy as np
import pytest

from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.cost import (
    Work,
    ends_seconds,
    first_messages,
    loads_of,
    message_count,
    predict,
    timed,
)

from .test_prediction import RATE, network


@pytest.mark.parametrize(("delivery", "shares_processor"), [("peer", 1), ("peer", 4), ("server", 1)])
def test_an_exchange_of_next_to_nothing_takes_its_fixed_time(delivery, shares_processor):
    """The order and the votes, and a message between every two participants of which one sends to the other."""
    n = 4
    cluster = network(
        n, link_up=1e15, link_down=1e15, server_up=1e15, machine_workers=shares_processor, epoch_seconds=0.02,
        first_message_seconds=0.003,
    )  # fmt: skip
    work = Work(400, 1, Choices(delivery=delivery))
    planner = EpochPlanner(ShuffleSpec(400, n, work.choices))
    planner.load()
    packets = planner.advance().packets
    receivers = np.repeat(packets.destinations, np.diff(packets.offsets))[: packets.n_packets]
    pairs = len(set(zip(packets.senders.tolist(), receivers.tolist(), strict=True)))
    fixed = 0.02 + pairs / n * shares_processor * 0.003
    assert predict(cluster, work).exchange_seconds == pytest.approx(fixed)


@pytest.mark.parametrize(("delivery", "relay"), [("peer", "pipelined"), ("server", "pipelined"), ("clique", "unicast")])
def test_each_pair_has_one_first_message_however_many_follow(delivery, relay):
    cluster = network(4, server_up=RATE)
    work = Work(400, 1 << 22, Choices(delivery=delivery, relay=relay, cache_fraction=0.5))
    planner = EpochPlanner(ShuffleSpec(400, 4, work.choices))
    planner.load()
    packets = planner.advance().packets
    pairs = {
        (int(sender), int(receiver))
        for number, sender in enumerate(packets.senders)
        for receiver in packets.destinations[packets.offsets[number] : packets.offsets[number + 1]]
    }
    loads = loads_of(cluster, work)
    assert message_count(work, loads) > len(pairs)
    assert first_messages(work, cluster, loads) == len(pairs)


def test_packing_the_first_message_and_unpacking_the_last_one_add_to_the_time_of_the_link():
    """Two workers have one message for each other: about 500 rows of 1000 bytes and their checksums."""
    pack, unpack = 5e8, 2e8
    work, links = Work(2000, 1000), network(2, send_rate=pack, receive_rate=unpack)
    loads = loads_of(links, work)
    nbytes = loads.worker_in.mean()
    assert nbytes == pytest.approx(500 * (1000 + 4), rel=0.02)
    assert ends_seconds(work, links, loads) == pytest.approx(nbytes / pack + nbytes / unpack)
    alone = nbytes / RATE
    assert alone + nbytes / pack + nbytes / unpack < timed(links, work, loads).exchange_seconds < 1.11 * alone
