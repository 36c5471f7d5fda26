"""Short exchanges: what takes time whatever is moved, and the ends of the first and the last message."""

import numpy as np
import pytest

from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.cost import (
    Work,
    loads_of,
    message_counts,
    predict,
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
    messages, firsts = message_counts(work, cluster, loads)
    assert messages > len(pairs) == firsts
