"""The grid of workers: routes, messages and loads against a walk along every route."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices
from dshuffle.planning.cost import ClusterRates, Work, predict
from dshuffle.planning.delivery.grid import GRID, WorkerGrid


def walked(n_workers):
    """Rows that workers send each other if each pair exchanges one, and the messages of both hops."""
    grid, traffic, messages = WorkerGrid(n_workers), np.zeros((n_workers, n_workers)), set()
    for sender in range(n_workers):
        for destination in range(n_workers):
            between = grid.forwarder(sender, destination)
            for hop, (start, end) in enumerate([(sender, between), (between, destination)]):
                if start != end:
                    messages.add((hop, start, end))
                    traffic[start, end] += sender != destination
    return traffic, messages


@given(n_workers=st.integers(1, 40))
def test_both_ends_of_every_hop_agree(n_workers):
    grid, ranks = WorkerGrid(n_workers), range(n_workers)
    into = [grid.forwarders_to(rank) for rank in ranks]
    through = [set(grid.senders_through(rank).tolist()) for rank in ranks]
    for sender in ranks:
        out = grid.forwarders_of(sender)
        assert len(out) == grid.n_columns
        for destination in ranks:
            between = grid.forwarder(sender, destination)
            assert between in out
            assert between in into[destination]
            assert sender in through[between]
            assert destination in grid.column_of(between)


@given(n_workers=st.integers(1, 60))
def test_messages_are_few(n_workers):
    assert WorkerGrid(n_workers).n_messages == len(walked(n_workers)[1])
    assert WorkerGrid(n_workers).n_messages <= 2 * n_workers * math.sqrt(n_workers)


@given(n_workers=st.integers(2, 60))
def test_no_worker_carries_much_more_than_others(n_workers):
    traffic = walked(n_workers)[0]
    for loads in (traffic.sum(axis=0), traffic.sum(axis=1)):
        assert loads.max() <= 2 * (n_workers - 1)
    assert GRID.hops(n_workers) == pytest.approx(traffic.sum() / n_workers / (n_workers - 1), rel=0.5 / n_workers**0.5)


def test_two_hops_are_predicted_to_pay_where_messages_are_short():
    cluster = ClusterRates(64, link_up=125e6, link_down=125e6)

    def seconds(share_nbytes):
        work = Work(64 * share_nbytes // 1024, 1024, Choices("global"))
        return [predict(cluster, work.with_choices(delivery=name)).exchange_seconds for name in ("peer", "grid")]

    peer, grid = seconds(2**20)
    assert grid < peer / 2
    peer, grid = seconds(2**25)
    assert peer < grid < 2 * peer


def test_no_workers():
    with pytest.raises(InvalidParameter, match=r"n_workers=0"):
        WorkerGrid(0)
