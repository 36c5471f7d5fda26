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
from dshuffle.noninferiority import Margin, PairedOutcome, PairedRuns, PairedTest


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
        ([0.1], None, "not clear yet (1 pair)"),
        ([0.1, -0.1, 0.0, 0.1], None, "not clear yet (4 pairs)"),
        (
            [0.1, -0.1, 0.0, 0.1, -0.1],
            PairedOutcome.NOT_WORSE,
            "not worse by more than 1: on average at most 0.157 worse (95 % confidence, 5 pairs; lower is better)",
        ),
        (
            [-0.5, -0.75, -0.25, -0.5, -0.5],
            PairedOutcome.NOT_WORSE,
            "not worse by more than 1: on average at least 0.109 better (95 % confidence, 5 pairs; lower is better)",
        ),
        ([0.1, -0.1, 0.0, 0.1, -0.1, 0.0], None, "not clear yet (6 pairs)"),
        (
            [3.0, 3.1, 2.9, 3.1, 2.9],
            PairedOutcome.WORSE,
            "worse by 3.00 [2.80, 3.20] (95 % interval, 5 pairs; lower is better)",
        ),
        (
            [1.0, 1.1, 0.9, 1.1, 0.9] * 4,
            PairedOutcome.WORSE,
            "worse by 1.00 [0.94, 1.06], but perhaps by less than the margin of 1 (95 % interval, 20 pairs; lower is "
            "better)",
        ),
        (
            [2.5, -1.5] * 10,
            PairedOutcome.CANNOT_TELL,
            "cannot tell: differences below 1.12 cannot be seen with 20 pairs, and this one is between 0.62 better and "
            "1.62 worse (95 % interval; lower is better); the margin is 1",
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
    text = "not worse by more than 5 %: on average at most 1.19 % worse (95 % confidence, 5 pairs; lower is better)"
    assert str(runs) == text
    assert runs_of([0.2, 0.21, 0.2, 0.19, 0.2], reference=2.0, margin="5%").outcome is PairedOutcome.WORSE


def test_a_margin_is_not_below_rounding():
    tiny = [3e-9, 2e-9, 3e-9, 2e-9, 3e-9]
    assert runs_of(tiny, reference=1e-8, margin="1%").outcome is PairedOutcome.WORSE
    assert runs_of(tiny, reference=2e-6, margin="1%", rounding=1e-6).outcome is PairedOutcome.NOT_WORSE


def test_errors_of_rounding_show_nothing():
    runs = runs_of([3e-9, 2e-9, 3e-9, 2e-9, 3e-9], reference=2.2e-8, margin="1%", rounding=1e-6)
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert str(runs).startswith("cannot tell: loss is 2.5e-08 at most in all runs, which is rounding, so the test says")
    assert json.loads(json.dumps(runs.to_dict()))["outcome"] == "cannot tell"
    assert runs_of([0.0] * 5, reference=0.0, margin="1%", rounding=1e-6).outcome is PairedOutcome.CANNOT_TELL


def test_a_difference_is_no_fraction_of_rounding():
    runs = runs_of([0.001, 0.002, 0.001, 0.002, 0.001], reference=1e-8, margin="1%", rounding=1e-6)
    assert str(runs) == "worse by 0.00140 [0.00034, 0.00246] (95 % interval, 5 pairs; lower is better)"
    diverged = dataclasses.replace(runs, way=(math.nan,) * 5)
    assert diverged.outcome is PairedOutcome.WORSE


def test_a_metric_that_never_changes_tests_nothing():
    runs = runs_of([0.0] * 5)
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert str(runs) == "cannot tell: the metric is the same in every run, so it tests nothing"
    assert runs_of([0.0] * 4).outcome is None
    assert runs_of([0.0] * 5, rounding=1e-6).outcome is PairedOutcome.NOT_WORSE


def test_a_null_pair_beyond_the_margin_forbids_not_worse_alone():
    even = [0.1, -0.1, 0.0, 0.1, -0.1]
    assert runs_of([], null=1.5).outcome is None
    runs = runs_of(even, null=1.5)
    assert runs.outcome is PairedOutcome.CANNOT_TELL, "more pairs would not change it"
    assert "differ by 1.50. So smaller differences cannot be seen, and the margin is 1." in str(runs)
    assert runs_of(even, null=0.9).outcome is PairedOutcome.NOT_WORSE
    assert runs_of([30.0, 31.0, 29.0, 31.0, 29.0], null=1.5).outcome is PairedOutcome.WORSE


def test_the_null_pair_and_equal_runs_count_as_measured():
    even = [0.1, -0.1, 0.0, 0.1, -0.1]
    runs = runs_of(even, null=0.75, repeated=-0.5)
    assert (runs.null_difference, runs.not_deterministic_by) == (0.75, 0.5)
    assert runs.outcome is PairedOutcome.NOT_WORSE
    runs = runs_of(even, null=0.75, repeated=-1.5)
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert "differ by 0.750, and two equal runs by 1.50. So smaller" in str(runs)


def test_a_way_that_diverges_is_worse():
    assert runs_of([math.nan]).outcome is None, "the first look counts"
    runs = runs_of([0.1, math.nan, -0.1, math.inf, 0.0])
    assert runs.outcome is PairedOutcome.WORSE
    assert str(runs) == "worse: it diverged in 2 of 5 runs, and reshuffling in none"
    assert runs.differences.tolist() == pytest.approx([0.1, -0.1, 0.0])
    fields = json.loads(json.dumps(runs.to_dict(), allow_nan=False))
    assert fields["diverged"] == 2
    assert fields["way"][1] is None
    runs = runs_of([math.nan] * 5)
    assert runs.outcome is PairedOutcome.WORSE
    assert json.loads(json.dumps(runs.to_dict(), allow_nan=False))["interval"] is None
    assert runs.shown_bounds == "[nan, nan]"


@pytest.mark.parametrize("field", ["reference", "null", "repeated"])
def test_a_reference_that_diverges_shows_nothing(field):
    runs = runs_of([0.0, 0.0])
    value = (10.0, math.nan) if field == "reference" else math.nan
    runs = dataclasses.replace(runs, **{field: value})
    assert runs.outcome is PairedOutcome.CANNOT_TELL
    assert str(runs) == "cannot tell: loss is not finite in a run that reshuffles everything: take a smaller step"
    json.dumps(runs.to_dict(), allow_nan=False)


def test_a_relative_margin_needs_a_reference_away_from_0():
    runs = runs_of([], reference=0.0, margin="1%")
    assert runs.outcome is PairedOutcome.CANNOT_TELL, "at once: all runs are 0"
    assert str(runs).startswith("cannot tell: loss is 0 with reshuffling, or scatters around it, and the margin is 1 %")
    assert str(runs).endswith("give a margin in the unit of the metric")
    r2 = (0.03, -0.02, 0.05, -0.04, 0.01)
    scattered = dataclasses.replace(runs_of([0.0] * 5, margin="1%"), reference=r2, way=r2, null=0.03, repeated=0.03)
    assert scattered.outcome is PairedOutcome.CANNOT_TELL
    assert "margin in the unit of the metric" in str(scattered)
    shifted = tuple(value + 1 for value in r2)
    clear = dataclasses.replace(scattered, reference=shifted, way=shifted, null=1.03, repeated=1.03)
    assert not clear.has_no_scale
    absolute = dataclasses.replace(scattered, test=PairedTest("loss", margin=0.2))
    assert absolute.outcome is PairedOutcome.NOT_WORSE
    rounded = dataclasses.replace(scattered, test=PairedTest("loss", margin="1%", rounding=0.01))
    assert "margin in the unit of the metric" not in str(rounded), "the margin is the rounding"


def test_equal_differences_decide_at_the_last_look():
    """Five equal accuracies may differ by less than their step. A margin of many steps is decided at once."""
    values = (0.90, 0.91, 0.92, 0.90, 0.91)
    coarse = dataclasses.replace(runs_of([0.0] * 5, margin=0.01), reference=values, way=values, null=0.9, repeated=0.9)
    assert coarse.step == pytest.approx(0.01)
    assert coarse.outcome is None
    wide = dataclasses.replace(coarse, test=PairedTest("loss", margin=0.1))
    assert wide.outcome is PairedOutcome.NOT_WORSE
    rounded = dataclasses.replace(coarse, reference=(0.9,) * 5, way=(0.9 + 1e-9,) * 5)
    assert rounded.step is None, "rounding is not a step"


@pytest.mark.parametrize(
    "metric",
    [
        "accuracy",
        "val_acc",
        "ROC_AUC",
        "f1",
        "top1",
        "iou",
        "test_neg_mean_squared_error",
        "d2_log_loss_score",
        "-loss",
    ],
)
def test_the_direction_of_such_a_metric_is_not_guessed(metric):
    with pytest.raises(InvalidParameter, match=rf"metric='{metric}' is not.*Add --higher-is-better or --lower-is-bett"):
        PairedTest(metric)
    assert PairedTest(metric, higher_is_better=False).direction == "lower is better"
    assert PairedTest(metric, higher_is_better=True).direction == "higher is better"
    assert not any(PairedTest(name).higher_is_better for name in ("val_loss", "error", "RMSE", "test_mae"))


def test_bounds_are_rounded_outward():
    runs = runs_of([1.123456, 1.0, 1.06, 1.02, 1.1], margin="1%", reference=100.0)
    shown = [float(text) for text in runs.shown_bounds.strip("[] %").split(", ")]
    least, most = map(runs.scaled, runs.interval)
    assert least - 0.01 < shown[0] <= least
    assert most <= shown[1] < most + 0.01
    assert runs.shown(-0.0) == "0.00 %"
    assert "-0 " not in str(runs_of([0.0, -0.0] * 10, margin="1%"))


@pytest.mark.parametrize("differences", [[0.1, -0.1, 0.0, 0.12, -0.1], [-0.5, -0.73, -0.21, -0.52, -0.48]])
def test_one_bound_is_shown_of_a_way_that_is_not_worse(differences):
    """It is the bound that decides, in the sentence and in the tables alike."""
    runs = runs_of(differences)
    quantile = scipy.stats.t(4).ppf(1 - 0.05 * 5 / 20)  # the first of the looks at 5, 10 and 20 pairs
    bound = np.mean(differences) + quantile * np.std(differences, ddof=1) / math.sqrt(5)
    assert runs.bounds == pytest.approx((-math.inf, bound))
    shown = float(runs.shown_bounds.removeprefix("≤ "))
    assert bound <= shown < bound + 0.001
    words = f"at most {shown} worse" if bound > 0 else f"at least {-shown} better"
    assert str(runs) == f"not worse by more than 1: on average {words} (95 % confidence, 5 pairs; lower is better)"


def test_a_mean_has_as_many_decimals_as_its_bounds():
    runs = runs_of([3.0, 3.1, 2.9, 3.1, 2.9], reference=12.0, margin="1%")
    assert (runs.shown_mean, runs.shown_bounds, runs.shown_margin) == ("25.0 %", "[23.3, 26.7] %", "1 %")
    assert runs.shown(0.1, sign=True) == "+0.833 %"


def test_huge_differences_have_an_exponent_and_no_mean_is_minus_zero():
    runs = dataclasses.replace(runs_of([0.0] * 5, reference=1.0), way=(1e30, 2e30, 1e30, 3e30, 1e30))
    assert runs.shown_mean == "1.60e+30"
    assert [f"{bound:.2e}" for bound in runs.bounds] == runs.shown_bounds.strip("[]").split(", ")
    json.dumps(runs.to_dict(), allow_nan=False)
    runs = runs_of([-1.004, 0.996, -0.004, -1.004, 0.996])
    assert (runs.mean, runs.shown_mean) == (pytest.approx(-0.004), "0.00")


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


@pytest.mark.parametrize(
    "noise", [pytest.param(noise, marks=pytest.mark.slow) for noise in ("normal", "skewed", "heavy tails")]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("by_chance", [0.0, 0.005])
@pytest.mark.parametrize(("samples", "margin"), [(30, 0.01), (100, 0.01), (200, 0.005)])
def test_the_error_rate_with_accuracies_on_few_samples(verdicts, samples, margin, by_chance):
    """Without regard to the step of an accuracy, 10 to 25 % of the answers "not worse" are wrong."""
    count = 500
    fractions, _ = verdicts.coarse_answers(1, 1.0, samples, margin, by_chance, count)
    assert fractions[PairedOutcome.NOT_WORSE] <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / count)
    fractions, _ = verdicts.coarse_answers(2, 0.0, samples, margin, by_chance, count)
    assert fractions[PairedOutcome.WORSE] < 0.02
    if samples > 30 and by_chance == 0:
        assert fractions[PairedOutcome.NOT_WORSE] > 0.9
