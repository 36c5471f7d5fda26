"""The paired test: beside SciPy and statsmodels, its answers, and its error rates in simulations of the program."""

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
from dshuffle.noninferiority import Margin, PairedOutcome, PairedRuns, PairedTest, holm


def runs_of(differences, *, reference=10.0, runs=None, **options):
    test = PairedTest("loss", **{"margin": 1.0, "pairs": 20, "higher_is_better": False, **options})
    sign = -1 if test.higher_is_better else 1
    way = tuple(reference + sign * difference for difference in differences)
    return PairedRuns(test=test, reference=(reference,) * len(differences), way=way, **(runs or {}))


def test_bounds_are_those_of_the_paired_t_test():
    rng = np.random.default_rng(1)
    reference, way = rng.normal(5, 1, 8), rng.normal(5.2, 1, 8)
    test = PairedTest("loss", margin=1.0, pairs=8)  # looks at 5 and at 8
    runs = PairedRuns(test=test, reference=tuple(reference), way=tuple(way))
    left = 1 - 25 / 64  # of the error rate, for the second look
    found = scipy.stats.ttest_rel(way, reference, alternative="less").confidence_interval(1 - 0.05 * left)
    assert runs.worst == pytest.approx(found.high, rel=1e-10)
    found = scipy.stats.ttest_rel(way, reference).confidence_interval(1 - 0.05 * left)
    assert runs.interval == pytest.approx((found.low, found.high), rel=1e-10)


def test_the_p_value_is_that_of_one_half_of_tost():
    """statsmodels tests two bounds; "not worse" is the upper one."""
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    rng = np.random.default_rng(2)
    reference = rng.normal(5, 1, 9)
    way = reference + rng.normal(0.05, 0.1, 9)
    runs = PairedRuns(test=PairedTest("loss", margin=0.3, pairs=9), reference=tuple(reference), way=tuple(way))
    runs = dataclasses.replace(runs, test=PairedTest("loss", margin=0.3, pairs=9))
    _, _, (_, p_value, _) = weightstats.ttost_paired(way, reference, -1.0, 0.3)
    assert runs.outcome is PairedOutcome.NOT_WORSE
    assert runs.p_value == pytest.approx(p_value / runs.test.spent_at(9), rel=1e-9)


def test_overlapping_samples_widen_the_bounds_as_nadeau_and_bengio_say():
    differences = [0.1, -0.1, 0.0, 0.12, -0.1]
    plain, drawn = (runs_of(differences, pairs=5, runs={"test_to_train": ratio}) for ratio in (0.0, 1 / 9))
    ratio = math.sqrt((1 / 5 + 1 / 9) / (1 / 5))
    assert (drawn.worst - drawn.mean) / (plain.worst - plain.mean) == pytest.approx(ratio)


def test_losses_by_sample_add_the_error_of_a_fixed_held_out_set():
    differences = [0.1, -0.1, 0.0, 0.12, -0.1]
    by_sample = np.random.default_rng(0).normal(0, 2, 400)
    plain = runs_of(differences, pairs=5, runs={"fixed": True})
    known = runs_of(differences, pairs=5, runs={"fixed": True, "by_sample": by_sample})
    error = math.hypot(np.std(differences, ddof=1) / math.sqrt(5), by_sample.std(ddof=1) / 20)
    assert known.worst - known.mean == pytest.approx(scipy.stats.t(4).ppf(0.95) * error)
    assert str(plain).endswith("lower is better; on these held-out samples)")
    assert str(known).endswith("lower is better)")


@pytest.mark.parametrize(("pairs", "looks"), [(20, (5, 10, 20)), (5, (5,)), (12, (5, 6, 12)), (50, (13, 25, 50))])
def test_the_error_rate_is_spent_in_parts(pairs, looks):
    test = PairedTest("loss", pairs=pairs)
    assert test.looks == looks
    assert sum(map(test.spent_at, looks)) == pytest.approx(1)


EVEN = [0.1, -0.1, 0.0, 0.1, -0.1]
LAST = "(95 % interval, 20 pairs; lower is better)"


@pytest.mark.parametrize(
    ("differences", "outcome", "text"),
    [
        ([], None, "not clear yet (0 pairs)"),
        ([0.1], None, "not clear yet (1 pair)"),
        ([*EVEN, 0.0], None, "not clear yet (6 pairs)"),
        (EVEN, "not worse", "not worse by more than 1: +0.000, at most 0.236 (95 % confidence, 5 pairs; "),
        ([-0.5, -0.75, -0.25, -0.5, -0.5], "not worse", "not worse by more than 1: -0.500, at most 0.089 (95 % confid"),
        ([3.0, 3.1, 2.9, 3.1, 2.9], "worse", "worse: +3.00 [2.71, 3.29] (95 % interval, 5 pairs; lower is better)"),
        ([1.0, 1.1, 0.9, 1.1, 0.9] * 4, "worse", f"worse: +1.00 [0.94, 1.06] {LAST}, but perhaps by less than the m"),
        ([2.5, -1.5] * 10, "cannot tell", f"cannot tell: +0.50 [-0.53, 1.53] {LAST}"),
    ],
)
def test_answers(differences, outcome, text):
    runs = runs_of(differences)
    assert (None if runs.outcome is None else runs.outcome.value) == outcome
    assert str(runs).startswith(text)


def test_higher_may_be_better():
    worse = runs_of([3.0, 3.1, 2.9, 3.1, 2.9], higher_is_better=True)
    assert worse.way[0] < worse.reference[0]
    assert worse.outcome is PairedOutcome.WORSE
    assert runs_of([-3.0, -3.1, -2.9, -3.1, -2.9], higher_is_better=True).outcome is PairedOutcome.NOT_WORSE


def test_a_relative_difference_is_a_ratio_of_means():
    """Its scatter is that of a ratio: a reference that scatters with the strategy does not widen it."""
    rng = np.random.default_rng(3)
    reference = rng.uniform(1, 3, 20)
    runs = PairedRuns(test=PairedTest("loss", margin="5%"), reference=tuple(reference), way=tuple(1.02 * reference))
    assert runs.mean == pytest.approx(0.02)
    assert runs.worst < 0.022, "the reference scatters by a third"
    assert runs.outcome is PairedOutcome.NOT_WORSE
    negative = PairedRuns(test=runs.test, reference=tuple(-reference), way=tuple(-0.98 * reference))
    assert negative.mean == pytest.approx(0.02)


def test_a_relative_bound_has_the_level_of_fieller():
    """Beside a bound that does not linearise: the strategy minus (1 + margin) times the reference."""
    rng = np.random.default_rng(4)
    reference = rng.normal(10, 0.5, 20)
    way = 1.01 * reference + rng.normal(0, 0.2, 20)
    runs = PairedRuns(test=PairedTest("loss", margin="5%", pairs=20), reference=tuple(reference), way=tuple(way))
    bound = scipy.optimize.brentq(
        lambda ratio: (
            scipy.stats.ttest_1samp(way - (1 + ratio) * reference, 0, alternative="less").pvalue - 0.05 * 0.75
        ),
        0,
        0.1,
    )
    assert runs.worst == pytest.approx(bound, rel=0.02)


def test_a_margin_is_not_below_rounding():
    tiny = [3e-9, 2e-9, 3e-9, 2e-9, 3e-9] * 2
    assert runs_of(tiny, reference=1e-8, margin="1%").outcome is PairedOutcome.WORSE
    assert runs_of(tiny, reference=2e-6, margin="1%", rounding=1e-6).outcome is PairedOutcome.NOT_WORSE


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (runs_of([3e-9, 2e-9, 3e-9, 2e-9, 3e-9], reference=2.2e-8, margin="1%", rounding=1e-6), "rounding"),
        (runs_of([0.0] * 5), "constant"),
        (runs_of([0.0] * 5, reference=0.0, margin="1%"), "no scale"),
        (runs_of(EVEN, reference=math.nan), "reference diverged"),
        (runs_of([2.5, -1.5] * 10), "pairs"),
        (runs_of([1.5, -1.5] * 10, runs={"test_to_train": 1 / 9}), "pairs"),
        (runs_of([2.5, -2.5] * 10, runs={"test_to_train": 1 / 9}), "same samples"),
        (runs_of([0.0, math.nan] * 10, runs={}), "diverged"),
        (runs_of([0.1, *[-0.1, 0.1] * 9, math.nan]), "some diverged"),
    ],
)
def test_a_reason_is_recorded(runs, reason):
    assert runs.reason == reason
    json.dumps(runs.to_dict(), allow_nan=False)
    if reason != "diverged":
        assert runs.outcome is PairedOutcome.CANNOT_TELL


def test_a_sign_flip_test_must_agree_at_few_pairs():
    """A single large gain makes the mean, and not the signs."""
    differences = [0.99, 0.98, 1.01, 0.97, 1.02, 1.0, 1.01, 0.98, 1.02, 0.96]
    runs = runs_of(differences, pairs=10, margin=1.0)
    flipped = scipy.stats.permutation_test(
        (1.0 - np.array(differences),), np.mean, permutation_type="samples", alternative="greater", n_resamples=np.inf
    )
    assert runs._signs_agree(1.0 - np.array(differences), 1.0) == (flipped.pvalue <= 0.75)
    for rate in (0.05, flipped.pvalue * 0.99 / 0.75, flipped.pvalue * 1.01 / 0.75):
        assert runs._signs_agree(1.0 - np.array(differences), rate) == (flipped.pvalue <= rate * 0.75)


def test_divergence_is_a_sign_test_with_counts():
    for n_pairs, n_diverged in ((5, 5), (10, 10), (20, 6), (20, 5)):
        runs = runs_of([math.nan] * n_diverged + [0.0, 0.1] * ((n_pairs - n_diverged) // 2 + 1))
        runs = dataclasses.replace(runs, way=runs.way[:n_pairs], reference=(10.0,) * n_pairs)
        p_value = scipy.stats.binomtest(n_diverged, n_diverged, alternative="greater").pvalue
        found = runs.outcome is PairedOutcome.WORSE
        assert found == (p_value <= 0.05 * runs.test.spent_at(n_pairs))
        if found:
            assert str(runs) == f"worse: it diverged in {n_diverged} of {n_pairs} pairs, and reshuffling in 0"
    both = dataclasses.replace(runs_of(EVEN), reference=(math.nan, *[10.0] * 4), way=(math.nan, 10.1, 9.9, 10.0, 10.1))
    assert both.diverged == (0, 0)
    assert both.outcome is PairedOutcome.NOT_WORSE, "as far as the other pairs show"
    only_reference = dataclasses.replace(runs_of(EVEN * 4), reference=(math.nan, *[10.0] * 19))
    assert only_reference.diverged == (0, 1)
    assert only_reference.outcome is PairedOutcome.NOT_WORSE


def test_a_relative_margin_needs_a_reference_away_from_0():
    r2 = (0.03, -0.02, 0.05, -0.04, 0.01)
    scattered = dataclasses.replace(runs_of(EVEN, margin="1%"), reference=r2, way=r2[1:] + r2[:1])
    assert scattered.reason == "no scale"
    shifted = dataclasses.replace(scattered, reference=tuple(value + 1 for value in r2))
    assert shifted.reason != "no scale"
    assert dataclasses.replace(scattered, test=PairedTest("loss", margin=0.2)).reason != "no scale"


def test_few_equal_differences_count_as_one_step():
    """Five equal accuracies may differ by less than their step. A margin of many steps is decided at once."""
    values = (0.90, 0.91, 0.92, 0.90, 0.91)
    coarse = dataclasses.replace(runs_of(EVEN, margin=0.01), reference=values, way=values)
    assert coarse.outcome is None
    assert dataclasses.replace(coarse, test=PairedTest("loss", margin=0.1)).outcome is PairedOutcome.NOT_WORSE
    rounded = dataclasses.replace(coarse, reference=(0.9,) * 5, way=(0.9 + 1e-9,) * 5)
    assert rounded.reason == "constant", "rounding is not a step"


@pytest.mark.parametrize(
    ("names", "higher"),
    [
        (("loss", "error", "mse", "RMSE", "mae", "nll", "perplexity"), False),
        (("accuracy", "auc", "f1", "r2", "score"), True),
    ],
)
def test_directions_of_exact_names(names, higher):
    assert {PairedTest(name).higher_is_better for name in names} == {higher}


@pytest.mark.parametrize("metric", ["val_loss", "error_free_rate", "inverse_mse", "loss_reduction", "-loss", "top1"])
def test_any_other_direction_is_asked_for(metric):
    with pytest.raises(InvalidParameter, match=rf"metric='{metric}' is not.*Add --higher-is-better or --lower-is-bett"):
        PairedTest(metric)
    assert PairedTest(metric, higher_is_better=False).direction == "lower is better"
    assert PairedTest(metric, higher_is_better=True).direction == "higher is better"


def test_bounds_are_rounded_outward():
    runs = runs_of([1.123456, 1.0, 1.06, 1.02, 1.1], margin="1%", reference=100.0)
    shown = [float(text) for text in runs.shown_bounds.strip("[] %").split(", ")]
    least, most = (100 * bound for bound in runs.interval)
    assert least - 0.01 < shown[0] <= least
    assert most <= shown[1] < most + 0.01
    assert runs.shown(-0.0) == "+0.00 %"
    assert "-0 " not in str(runs_of([0.0, -0.0] * 10, margin="1%", rounding=1e-9))


def test_a_mean_has_as_many_decimals_as_its_bounds():
    runs = runs_of([3.0, 3.1, 2.9, 3.1, 2.9], reference=12.0, margin="1%")
    assert (runs.shown_mean, runs.shown_bounds, runs.shown_margin) == ("+25.0 %", "[22.6, 27.4] %", "1 %")
    assert runs.shown(0.1 / 12) == "+0.833 %"


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
        PairedRuns(test=PairedTest("loss"), reference=(1.0,), way=(1.0, 2.0))


def test_json():
    fields = json.loads(json.dumps(runs_of(EVEN).to_dict(), allow_nan=False))
    assert (fields["outcome"], fields["limit"], len(fields["way"])) == ("not worse", 1.0, 5)
    assert fields["mean"] == pytest.approx(0)
    assert json.loads(json.dumps(runs_of([]).to_dict(), allow_nan=False))["interval"] is None


def test_holm_is_that_of_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    rng = np.random.default_rng(5)
    runs = {f"way {place}": runs_of(rng.normal(0, 0.25, 10).tolist(), pairs=10) for place in range(5)}
    p_values = [one.p_value for one in runs.values()]
    assert len({*p_values}) > 3
    expected = multitest.multipletests(p_values, method="holm")[1]
    assert holm(runs) == pytest.approx(dict(zip(runs, expected, strict=True)))


@pytest.fixture(scope="module")
def verdicts():
    path = Path(__file__).parent / "benchmarks" / "verdicts.py"
    spec = importlib.util.spec_from_file_location("verdicts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["verdicts"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["verdicts"]


def within(count, rate, most):
    """Whether a simulated rate does not show that the true one is above a bound: the 99 % interval reaches it."""
    return scipy.stats.binomtest(round(rate * count), count).proportion_ci(0.99).low <= most


@pytest.mark.slow
@pytest.mark.parametrize("source", ["samples", "runs"])
@pytest.mark.parametrize("name", ["normal", "log-normal", "heavy tails"])
def test_error_rates_of_the_whole_program(verdicts, name, source):
    """Without the correction, 20 to 36 % of "not worse" are wrong at the margin if held-out samples are the noise."""
    count, (draw, spread) = 300, verdicts.DISTRIBUTIONS[name]
    wrong = verdicts.numbers(verdicts.Cell(draw, 300, 0.5, source, 1.0, spread), count, 1)
    assert within(count, wrong.not_worse / count, 0.06)
    assert not within(count, 1 - wrong.covered / count, 0.0) or wrong.covered >= 0.92 * count
    equal = verdicts.numbers(verdicts.Cell(draw, 300, 1.0, source, 0.0, spread), count, 2)
    assert within(count, equal.worse / count, 0.02)
    assert within(count, 1 - equal.not_worse / count, 0.30)


@pytest.mark.slow
def test_without_the_correction_the_rate_is_far_beyond(verdicts):
    count, (draw, spread) = 200, verdicts.DISTRIBUTIONS["normal"]
    plain = verdicts.numbers(verdicts.Cell(draw, 300, 0.5, "samples", 1.0, spread), count, 1, ratio=0.0)
    assert plain.not_worse / count > 0.12


@pytest.mark.slow
def test_error_rates_of_accuracies_and_of_divergence(verdicts):
    count = 300
    assert within(count, verdicts.accuracy(500, 0.5, 1.0, count, 1).not_worse / count, 0.06)
    for both in (0.05, 0.2, 0.5):
        assert within(count, verdicts.diverging((both, both), count, 3).worse / count, 0.05)
    assert verdicts.diverging((0.0, 1.0), 20, 4).worse == 20
