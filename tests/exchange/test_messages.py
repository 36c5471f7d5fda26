"""Messages: their names, and how flows are cut into them, the same on both sides."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.exchange.mailboxes import flows_of_hops, flows_of_samples, rows_per_message

STORE = -2


@given(first=st.integers(0, 50), n_items=st.integers(0, 60), at_most=st.integers(1, 9))
def test_the_messages_of_a_flow_tile_its_items(first: int, n_items: int, at_most: int) -> None:
    flow = flows_of_samples({1: np.arange(first), 2: np.arange(n_items)}, at_most=at_most)[1][2]
    messages = [flow.message(sequence) for sequence in range(flow.n_messages)]
    assert [item for begin, end in messages for item in range(begin, end)] == list(range(first, first + n_items))
    lengths = [end - begin for begin, end in messages]
    assert len(lengths) == -(-n_items // at_most)  # as few as possible
    assert not lengths or (max(lengths) <= at_most and max(lengths) - min(lengths) <= 1)
    assert flow.longest == max(lengths, default=0)


@given(row_nbytes=st.integers(1, 5000), message_bytes=st.integers(1, 5000))
def test_a_message_is_as_close_below_its_size_as_whole_rows_allow(row_nbytes: int, message_bytes: int) -> None:
    rows = rows_per_message(row_nbytes, message_bytes)
    assert rows * row_nbytes <= message_bytes or rows == 1
    assert (rows + 1) * row_nbytes > message_bytes


def test_samples_of_all_participants_stand_in_one_list() -> None:
    parts = {3: np.array([7, 1, 4]), STORE: np.arange(10, 15), 0: np.array([2])}
    samples, flows = flows_of_samples(parts, at_most=2)
    assert list(flows) == list(parts)
    for who, ids in parts.items():
        got = [samples[slice(*flows[who].message(i))] for i in range(flows[who].n_messages)]
        np.testing.assert_array_equal(np.concatenate(got), ids)
    assert [flows[who].n_messages for who in parts] == [2, 1, 1]
    empty, no_flows = flows_of_samples({}, at_most=2)
    assert (len(empty), no_flows) == (0, {})


@given(data=st.data(), n_hops=st.integers(0, 40), at_most=st.integers(1, 6))
def test_hops_are_cut_where_the_group_changes(data: st.DataObject, n_hops: int, at_most: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    others = rng.integers(-1, 3, n_hops, dtype=np.int32)
    groups = rng.integers(-1, 4, n_hops, dtype=np.int32)
    gates = np.where(others == 0, groups, -1).astype(np.int32)
    order, flows = flows_of_hops(others, groups, gates, at_most=at_most)
    assert sorted(order.tolist()) == list(range(n_hops))
    assert set(flows) == set(others.tolist())
    for other, flow in flows.items():
        assert flow.gates is not None
        seen = []
        for sequence, gate in enumerate(flow.gates.tolist()):
            hops = order[slice(*flow.message(sequence))]
            assert 0 < len(hops) <= at_most
            assert (others[hops] == other).all()
            assert len(set(groups[hops].tolist())) == 1
            assert set(gates[hops].tolist()) == {gate}
            seen += hops.tolist()
        # By group, and as given within one: the other side draws up the same list.
        expected = sorted(np.flatnonzero(others == other).tolist(), key=lambda hop: (groups[hop], hop))
        assert seen == expected
