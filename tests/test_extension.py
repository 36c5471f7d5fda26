"""A new delivery, and a new assignment, is one file and one line in a registry: everything else finds it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.compare import product_of_ways
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.pipeline import LocalWorkers, Pipeline, Training
from dshuffle.planning import DELIVERIES, Choices, Delivery, EpochPlanner, Packets, ShuffleSpec
from dshuffle.planning.assignment import ASSIGNMENTS, Assignment, EpochDraw
from dshuffle.planning.cost import ClusterRates, Work, all_ways, compare_costs
from dshuffle.planning.types import lowest_bit
from dshuffle.synthetic import keyed_regression

from .planning.test_unequal_shares import check_contract
from .runtime.test_exactly_once import check_run


def plan_first_holder(plan_input):
    """One packet for each sample, from its holder with the lowest rank."""
    needed = plan_input.missing_samples()
    senders = [lowest_bit(plan_input.holders[sample, 0]) for sample in needed]
    return Packets.uncoded(needed, plan_input.destinations[needed], senders)


@dataclass(frozen=True, slots=True)
class Rotate(Assignment):
    """Every sample moves to the next worker."""

    name: ClassVar[str] = "rotate"
    forms: ClassVar[str] = "'rotate'"

    def draw(self, draw):
        return EpochDraw((draw.previous + 1) % np.int32(draw.n_workers))

    def missing_fraction(self, cached, excess):
        return 1 - excess


@dataclass(frozen=True, slots=True)
class Deal(Assignment):
    """Samples are dealt out, from another worker on in every epoch."""

    name: ClassVar[str] = "deal"
    forms: ClassVar[str] = "'deal'"
    forgets: ClassVar[bool] = True

    def draw(self, draw):
        return EpochDraw((np.arange(draw.n_samples, dtype=np.int32) + draw.epoch) % np.int32(draw.n_workers))


class RotateInOneStep(Rotate):
    """It uses the epoch before, and says that it does not."""

    forgets = True


@pytest.fixture
def toys(monkeypatch):
    delivery = Delivery("first-holder", plan_first_holder, plans_own_parts=True)
    monkeypatch.setitem(DELIVERIES, delivery.name, delivery)
    monkeypatch.setitem(ASSIGNMENTS, "rotate", Rotate)
    monkeypatch.setitem(ASSIGNMENTS, "deal", Deal)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("rule", ["rotate", "deal"])
@pytest.mark.parametrize("delivery", ["first-holder", "clique"])
def test_the_contract_holds_for_rules_that_leave_out_what_is_optional(rule, delivery):
    check_contract(rule, delivery)
    check_contract(rule, delivery, "contiguous", every=2)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("rule", ["rotate", "deal"])
def test_sessions_of_such_rules_give_every_sample_once(rule, tmp_path):
    with (
        LocalCluster(n_workers=3, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for seed, delivery in enumerate(["first-holder", "clique"]):
            check_run(client, 3, np.random.default_rng(seed), rule, delivery, tmp_path / delivery, 3)


def test_a_rule_gets_the_epoch_before_only_if_it_says_that_it_depends_on_it():
    planner = EpochPlanner(ShuffleSpec(8, 2, Choices(RotateInOneStep(), sharding="contiguous")))
    planner.load()
    with pytest.raises(PlanError, match=r"declares forgets = True, so draw\.previous does not exist"):
        planner.advance()


def test_a_rule_does_not_balance_classes_or_count_as_a_new_draw_unless_it_says_so():
    with pytest.raises(InvalidParameter, match="cannot preserve class balance"):
        Choices(Rotate(), balance="y")
    assert not Choices(Rotate()).reshuffles_all


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
