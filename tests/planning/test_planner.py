import pytest

from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning import DELIVERIES, Choices, Delivery, EpochPlanner, Packets, ShuffleSpec, WorkerHistory
from dshuffle.planning.randomness import DRAW_VERSION


def make(n_samples=12, n_workers=3, **changes):
    version, first = changes.pop("draw_version", DRAW_VERSION), changes.pop("first_epoch", 0)
    return ShuffleSpec(n_samples, n_workers, Choices(**changes), version, first)


def test_a_wrong_plan_is_never_handed_out(monkeypatch):
    planner = EpochPlanner(make())
    planner.load()
    wrong = Delivery("peer", lambda *args, **options: Packets.uncoded([], [], []))
    monkeypatch.setitem(DELIVERIES, "peer", wrong)
    with pytest.raises(PlanError, match="the delivery 'peer' does not give every worker exactly"):
        planner.advance()
    assert planner.current.epoch == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draw_version": 1}, "draw_version=1 .*3 in this release.*Use the release"),
        ({"n_workers": 0}, "n_workers=0 .* >= 1"),
        ({"first_epoch": -1}, "first_epoch=-1 .*integer >= 0"),
        ({"first_epoch": 2**63}, r"first_epoch=9223372036854775808 .*in \[0, 9223372036854775807\]"),
        ({"first_epoch": 10**5 + 1, "assignment": "partial:0.1"}, "first_epoch=100001 .*'partial:0.1' depends on all"),
        ({"n_workers": 1.5}, "n_workers=1.5 .* integer"),
        ({"n_samples": 2**63}, r"n_samples=9223372036854775808 .*below 2\*\*63"),
        ({"n_samples": 2}, "n_samples=2 .* >= 3.*fewer samples than workers"),
        ({"assignment": "chunks"}, "assignment='chunks' .*'chunks:ROWS'"),
        ({"assignment": "chunks:6"}, "chunk_rows=6 .*at most 5, for 12 samples and 3 workers.*smaller chunks"),
        ({"delivery": "coded", "n_workers": 65, "n_samples": 65}, "n_workers=65 .*at most 64 .*'coded'.*'server'"),
        ({"delivery": "leftover", "cache_fraction": 0.5}, "delivery='leftover' .*with excess.*'ubershuffle'"),
        ({"sharding": "hash"}, "sharding='hash'.*'contiguous', 'random'"),
        ({"cache_fraction": 0.3}, r"cache_fraction=0.3 .* \[1/3, 1\]"),
        ({"cache_fraction": float("nan")}, "cache_fraction=nan"),
    ],
)
def test_bad_specifications(changes, message):
    with pytest.raises(InvalidParameter, match=message):
        make(**changes)


def test_hosts_are_those_of_all_workers():
    spec = ShuffleSpec(100, 4, Choices(), hosts=(0, 0, 1, 1))
    assert spec.with_history(WorkerHistory(5), 0).hosts == spec.with_workers(3).hosts == ()
