"""The paired test: its bounds beside SciPy's, its answers, and its error rate in simulated comparisons."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy

from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority import Margin, PairedOutcome, PairedRuns, PairedTest, same_decimals


def runs_of(differences, *, reference=10.0, null=0.0, repeated=0.0, **options):
    test = PairedTest("loss", **{"margin": 1.0, "pairs": 20, **options})
    values = (reference,) * max(1, len(differences))
    sign = -1 if test.higher_is_better else 1
    way = tuple(reference + sign * difference for difference in differences)
    return PairedRuns(test=test, reference=values, way=way, null=reference + null, repeated=reference + repeated)


def test_bounds_are_those_of_the_paired_t_test():
    rng = np.random.default_rng(1)
    reference, way = rng.normal(5, 1, 8), rng.normal(5.2, 1, 8)
    runs = PairedRuns(
        test=PairedTest("loss", margin=1.0, pairs=8),  # looks at 5 and at 8
        reference=tuple(reference),
        way=tuple(way),
        null=reference[0],
        repeated=reference[0],
    )
    rest = 3 / 8  # of the error rate is left for the second look
    found = scipy.stats.ttest_rel(way, reference, alternative="less").confidence_interval(1 - 0.05 * rest)
    assert runs.worst == pytest.approx(found.high, rel=1e-10)
    found = scipy.stats.ttest_rel(way, reference).confidence_interval(1 - 0.05 * rest)
    assert runs.interval == pytest.approx((found.low, found.high), rel=1e-10)


@pytest.mark.parametrize(("pairs", "looks"), [(20, (5, 10, 20)), (5, (5,)), (12, (5, 6, 12)), (50, (13, 25, 50))])
def test_the_error_rate_is_spent_in_parts(pairs, looks):
    test = PairedTest("loss", pairs=pairs)
    assert test.looks == looks
    assert sum(map(test.spent_at, looks)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("differences", "outcome", "text"),
    [
        ([], None, "not clear yet (0 pairs)"),
        ([0.1, -0.1, 0.0, 0.1], None, "not clear yet (4 pairs)"),
        ([0.1, -0.1, 0.0, 0.1, -0.1], PairedOutcome.NOT_WORSE, "not worse than 1 at 95 % (5 pairs; worst case +0.156)"),
        ([0.1, -0.1, 0.0, 0.1, -0.1, 0.0], None, "not clear yet (6 pairs)"),
        ([3.0, 3.1, 2.9, 3.1, 2.9], PairedOutcome.WORSE, "worse by 3 [2.81, 3.19] (5 pairs)"),
        ([1.0, 1.1, 0.9, 1.1, 0.9] * 4, PairedOutcome.WORSE, "worse by 1 [0.95, 1.05] (20 pairs)"),
        (
            [2.5, -1.5] * 10,
            PairedOutcome.CANNOT_TELL,
            "cannot tell: differences below 0.96 cannot be seen with 20 pairs",
        ),
    ],
)
def test_answers(differences, outcome, text):
    runs = runs_of(differences)
    assert runs.outcome is outcome
    assert str(runs) == text


def test_higher_may_be_better():
    worse = runs_of([3.0, 3.1, 2.9, 3.1, 2.9], higher_is_better=True)
    assert worse.way[0] < worse.reference[0]
    assert worse.outcome is PairedOutcome.WORSE
    assert runs_of([-3.0, -3.1, -2.9, -3.1, -2.9], higher_is_better=True).outcome is PairedOutcome.NOT_WORSE


def test_a_relative_margin_is_a_fraction_of_the_reference():
    runs = runs_of([0.01, 0.0, 0.02, 0.01, 0.0], reference=-2.0, margin="5%")
    assert runs.limit == pytest.approx(0.1)
    assert str(runs) == "not worse than 5 % at 95 % (5 pairs; worst case +1.05 %)"
    assert runs_of([0.2, 0.21, 0.2, 0.19, 0.2], reference=2.0, margin="5%").outcome is PairedOutcome.WORSE


def test_a_margin_is_not_below_rounding():
    tiny = [3e-9, 2e-9, 3e-9, 2e-9, 3e-9]
    assert runs_of(tiny, reference=1e-8, margin="1%").outcome is PairedOutcome.WORSE
    assert runs_of(tiny, reference=1e-8, margin="1%", rounding=1e-6).outcome is PairedOutcome.NOT_WORSE


def test_a_null_pair_beyond_the_margin_ends_the_test():
    runs = runs_of([], null=1.5)
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert str(runs) == (
        "cannot tell: two runs of the reference that differ in the seed of the shuffle alone differ by 1.5, more "
        "than the margin of 1. Take a larger margin, or hold out more samples: more pairs do not help"
    )
    assert runs_of([0.0] * 5, null=0.9).outcome is PairedOutcome.NOT_WORSE


def test_a_metric_that_never_changes_tests_nothing():
    runs = runs_of([0.0] * 5, reference=1.0, higher_is_better=True)
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert str(runs) == "cannot tell: the metric is the same in every run, so it tests nothing"
    assert runs_of([0.0] * 4).outcome is None
    assert runs_of([0.0, 0.0, 0.0, 0.0, 0.01]).outcome is PairedOutcome.NOT_WORSE


def test_both_bounds_have_as_many_decimals():
    assert same_decimals(-1.0, 12.3456) == ("-1.0", "12.3")
    assert same_decimals(0.95, 1.05) == ("0.95", "1.05")
    assert same_decimals(120.4, 1234.0) == ("120", "1234")


def test_equal_runs_that_differ_widen_the_null():
    runs = runs_of([], null=0.75, repeated=-0.5)
    assert runs.not_deterministic_by == 0.5
    assert runs.null_difference == 1.25
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert "of which two equal runs differ by 0.5" in str(runs)


@pytest.mark.parametrize("margin", [0, -0.1, "0%", "-1%", "much", float("nan"), float("inf"), True, None])
def test_a_margin_is_a_number_above_zero(margin):
    with pytest.raises(InvalidParameter, match=r"margin=.* must be a number > 0 .* or a percentage of it such as '1%'"):
        PairedTest("loss", margin=margin)


def test_margins():
    assert Margin.of(" 2.5 % ") == Margin(0.025, relative=True)
    assert Margin.of("0.5") == Margin.of(0.5) == Margin(0.5)
    assert (str(Margin.of("1%")), str(Margin(0.02))) == ("1 %", "0.02")


def test_bad_values():
    with pytest.raises(InvalidParameter, match="pairs=4 is not allowed; it must be an integer >= 5"):
        PairedTest("loss", pairs=4)
    with pytest.raises(InvalidParameter, match=r"metric='loss' is not allowed; it must be finite in every run.*nan"):
        runs_of([math.nan])
    with pytest.raises(InvalidParameter, match=r"margin='1 %' is not allowed; it must be a number: loss is 0"):
        runs_of([0.0], reference=0.0, margin="1%")
    with pytest.raises(InvalidParameter, match=r"len\(reference\)=1 "):
        dataclasses.replace(runs_of([]), way=(1.0, 2.0))


def test_json():
    fields = json.loads(json.dumps(runs_of([0.1, -0.1, 0.0, 0.1, -0.1]).to_dict(), allow_nan=False))
    assert (fields["outcome"], fields["limit"], len(fields["way"])) == ("not worse", 1.0, 5)
    assert fields["mean"] == pytest.approx(0)
    assert json.loads(json.dumps(runs_of([]).to_dict(), allow_nan=False))["interval"] is None


@pytest.fixture(scope="module")
def verdicts():
    path = Path(__file__).parent / "benchmarks" / "verdicts.py"
    spec = importlib.util.spec_from_file_location("verdicts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["verdicts"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["verdicts"]


@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy tails"])
def test_the_error_rate_in_simulated_comparisons(verdicts, noise):
    """At the margin, 5 % of the answers "not worse" may be wrong. If every look spent all 5 %, 10 % would be."""
    count = 500
    draw, spread = verdicts.DISTRIBUTIONS[noise]
    fractions, _ = verdicts.answers(1, 1.0, 0.25, draw, spread, count)
    assert fractions[PairedOutcome.NOT_WORSE] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / count)
    fractions, n_pairs = verdicts.answers(2, 0.0, 0.5, draw, spread, count)
    assert fractions[PairedOutcome.NOT_WORSE] > 0.9
    assert fractions[PairedOutcome.WORSE] < 0.01
    assert n_pairs < 7
    fractions, _ = verdicts.answers(3, 2.0, 0.5, draw, spread, count)
    assert fractions[PairedOutcome.NOT_WORSE] == 0
    assert fractions[PairedOutcome.WORSE] > 0.9
