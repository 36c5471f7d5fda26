"""A new delivery, and a new assignment, is one file and one line in a registry: everything else finds it there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.compare import product_of_ways
from dshuffle.pipeline import LocalWorkers, Pipeline, Training
from dshuffle.planning import DELIVERIES, Choices, EpochPlanner, Packets, ShuffleSpec
from dshuffle.planning.assignment import ASSIGNMENTS, Assignment, EpochDraw
from dshuffle.planning.cost import ClusterRates, Work, all_ways, compare_costs
from dshuffle.planning.delivery.peer import RowsFromPeers
from dshuffle.planning.grouping import lowest_bit
from dshuffle.synthetic import keyed_regression


def plan_first_holder(plan_input):
    """One packet for each sample, from its holder with the lowest rank."""
    needed = plan_input.missing_samples()
    senders = [lowest_bit(plan_input.holders[sample, 0]) for sample in needed]
    return Packets.uncoded(needed, plan_input.destinations[needed], senders)


class FirstHolder(RowsFromPeers):
    name = "first-holder"
    plan = staticmethod(plan_first_holder)


@dataclass(frozen=True, slots=True)
class Rotate(Assignment):
    """Every sample moves to the next worker."""

    name: ClassVar[str] = "rotate"
    forms: ClassVar[str] = "'rotate'"

    def draw(self, draw):
        return EpochDraw((draw.previous + 1) % np.int32(draw.n_workers))

    def missing_fraction(self, cached, excess):
        return 1 - excess


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setitem(DELIVERIES, "first-holder", FirstHolder())
    monkeypatch.setitem(ASSIGNMENTS, "rotate", Rotate)


@pytest.mark.usefixtures("toys")
def test_planning_and_the_cost_model_know_them():
    planner = EpochPlanner(ShuffleSpec(8, 2, Choices("rotate", "first-holder", sharding="contiguous")))
    planner.load()
    assert planner.advance().ranks.tolist() == [1] * 4 + [0] * 4
    cluster = ClusterRates(4, link_up=1e6, link_down=1e6, server_up=1e6)
    ways = all_ways(cluster, Work(10_000, 100), assignments=["rotate"])
    assert {"rotate + peer", "rotate + first-holder"} < {way.way for way in ways}
    found = {prediction.work.way: prediction for prediction in compare_costs(cluster, ways)}
    assert found["rotate + first-holder"].needed == 10_000
    assert found["rotate + first-holder"].exchange_seconds == pytest.approx(found["rotate + peer"].exchange_seconds)


@pytest.mark.usefixtures("toys")
def test_the_command_line_knows_them():
    arguments = [
        "plan",
        "--samples",
        "100",
        "--workers",
        "4",
        "--assignment",
        "rotate",
        "--delivery",
        "first-holder",
        "--json",
    ]
    ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert [row["packets"] for row in json.loads(ran.stdout)["deliveries"]] == [100]
    arguments = [
        "advise",
        "--workers",
        "4",
        "--samples",
        "1000",
        "--bandwidth",
        "1gbit",
        "--assignment",
        "rotate",
        "--json",
    ]
    ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "rotate + first-holder" in [way["way"] for way in json.loads(ran.stdout)["ways"]]
    ran = CliRunner().invoke(main, ["compare", "--help"], catch_exceptions=False)
    assert "first-holder" in ran.output
    assert "rotate" in ran.output


@pytest.mark.slow
@pytest.mark.usefixtures("toys")
def test_sessions_and_comparisons_know_them(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", keyed_regression(400), chunk_rows=50)
    ways = product_of_ways(Choices(sharding="contiguous"), ["rotate"], ["first-holder", "peer"])
    training, threads = Training("linear_regression", epochs=3, step=0.1), LocalWorkers(2, processes=False)
    comparison = Pipeline(dataset, training, ways, threads, report=tmp_path / "report").run(progress=False).comparison
    for way in comparison.ways:
        assert [record.needed for record in way.records] == [400] * 3
        assert way.records[1].wire_received_bytes[0] == way.records[1].wire_received_bytes[1] > 0
    first, peer = comparison.ways
    assert first.records[1].choices.label == "rotate + first-holder"
    assert [point.error for point in first.history] == [point.error for point in peer.history]
