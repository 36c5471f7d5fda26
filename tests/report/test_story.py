"""The answer of a comparison, and the sentences that explain it."""

from __future__ import annotations

import dataclasses

import pytest

from dshuffle.planning import Choices
from dshuffle.report import TrainingPoint, story

from .conftest import changed, with_pairs


def said_of(comparison):
    return " ".join(story(comparison))


def only(comparison, *labels):
    return dataclasses.replace(comparison, ways=tuple(way for way in comparison.ways if way.label in labels))


def with_records(comparison, label, **values):
    """Other values of the records of a strategy: one for all of them, or one for each in a list."""

    def change(way):
        fields = [
            {name: value[place] if isinstance(value, list) else value for name, value in values.items()}
            for place in range(len(way.records))
        ]
        records = [dataclasses.replace(record, **own) for record, own in zip(way.records, fields, strict=True)]
        return dataclasses.replace(way, records=tuple(records))

    return changed(comparison, [label], change)


def with_error(comparison, label, error):
    def change(way):
        return dataclasses.replace(way, history=(*way.history[:-1], dataclasses.replace(way.history[-1], error=error)))

    return changed(comparison, [label], change)


def with_seconds(comparison, label, seconds):
    epochs = [0.3 + value for value in seconds]
    return with_records(comparison, label, exchange_seconds=list(seconds), epoch_seconds=epochs, waited_seconds=0.0)


def test_a_slow_rank_is_the_last_sentence(comparison):
    before = story(comparison)
    *others, slow = story(with_records(comparison, "global + peer", rank_training_seconds=(0.5, 2.0, 0.5)))
    assert others == before
    assert slow == (
        "With “global + peer”, rank 1 trained 4.0 times as long as the median of the others, which waited 1.50 s an "
        "epoch."
    )


UNTESTED = "Cannot tell whether to reshuffle: no strategy was tested in pairs of runs."


def test_the_fastest_way_follows_the_answer(comparison):
    for label, seconds in (("global + peer", 0.2), ("global + server", 0.6), ("global + storage", 0.9)):
        comparison = with_seconds(comparison, label, [seconds] * 5)
    answer, times, *_ = story(comparison)
    assert answer == UNTESTED
    assert times == (
        "To reshuffle everything every epoch, use “global + peer” (an epoch takes 2.4 times as long here with "
        "“global + storage”). An epoch takes 500 ms with “global + peer”, 900 ms with “global + server”, 1.20 s with "
        "“global + storage” and 310 ms without an exchange. The next exchange runs beside training."
    )
    assert story(only(comparison, "global + peer", "global + server"))[1].startswith(
        "To reshuffle everything every epoch, use “global + peer” (an epoch takes 1.8 times as long here with "
        "“global + server”)."
    )


def test_auto_is_not_re_reading(comparison):
    auto = dataclasses.replace(comparison.ways[3], label="auto", choices=Choices("global", "auto"))
    comparison = dataclasses.replace(comparison, ways=(comparison.ways[5], auto))
    assert "times as long here with “auto”)." in story(comparison)[1]


def test_what_loaders_do_that_re_read_stands_beside(comparison):
    chunks = dataclasses.replace(comparison.ways[3], label="chunks + storage", choices=Choices("chunks", "storage"))
    comparison = dataclasses.replace(comparison, ways=(*comparison.ways, chunks))
    comparison = with_error(with_seconds(comparison, "chunks + storage", [0.1] * 5), "chunks + storage", 0.03)
    sentence = "“chunks + storage” keeps the rows of a chunk together: an epoch takes 400 ms."
    assert story(comparison)[1].endswith(f". {sentence}")


def with_idle(comparison, idle):
    for label, share in idle.items():
        comparison = with_records(comparison, label, cpu_idle=share)
    return comparison


def test_times_that_processors_limit_are_doubted(comparison):
    idle = {"global + peer": 0.3, "global + server": 0.16, "global + storage": 0.15}
    assert "processors" not in said_of(with_idle(comparison, idle))
    assert "Processors" not in said_of(with_idle(comparison, idle))
    one = story(with_idle(comparison, idle | {"global + server": 0.1}))[-1]
    assert one.startswith("Processors were idle for less than 15 % of an exchange with “global + server”: they, or")
    whole = story(with_idle(comparison, dict.fromkeys(idle, 0.0)))[-1]
    assert whole.startswith(
        "Processors were idle for less than 15 % of an exchange with all of these strategies: they, or"
    )


def test_processors_are_not_blamed_where_a_link_explains_the_time(comparison):
    comparison = with_idle(comparison, {"global + peer": 0.3, "global + server": 0.1, "global + storage": 0.1})
    seconds = {way.label: way.figures.shuffle_seconds.median for way in comparison.ways}

    def said(part):
        ways = [dataclasses.replace(way, predicted_wire_seconds=part * seconds[way.label]) for way in comparison.ways]
        return said_of(dataclasses.replace(comparison, ways=tuple(ways)))

    assert "Processors" not in said(0.51)
    assert "with “global + server” and “global + storage”: they, or" in said(0.49)


def test_local_ways_are_never_the_fastest_shuffle(comparison):
    text = story(only(comparison, "local, as stored", "partial:0.1 + peer"))[1]
    assert text.startswith("No strategy that reshuffles everything ran for two epochs")


def every_second(comparison, *labels):
    """The comparison with strategies that have an exchange for every second epoch only."""
    return changed(
        comparison, labels, lambda way: dataclasses.replace(way, choices=dataclasses.replace(way.choices, every=2))
    )


def test_ways_that_reshuffle_every_second_epoch_alone_cannot_be_ranked(comparison):
    sparse = every_second(only(comparison, "local, shuffled once", "global + peer"), "global + peer")
    assert story(sparse)[1] == (
        "No strategy reshuffles everything before every epoch, so none can be called the fastest. "
        "Add one with --choice every=1."
    )


def test_the_times_of_ways_that_exchange_for_every_second_epoch_stand_beside(comparison):
    labels = "global + server", "partial:0.1 + peer"
    sparse = every_second(comparison, *labels)
    for label, factor in zip(labels, (2, 1), strict=True):  # epochs 1 and 3 have no exchange
        seconds = [factor * value for value in (9, 0.2, 0.4, 0.2, 0.4)]
        sparse = with_records(sparse, label, epoch_seconds=seconds)
    assert [sentence for sentence in story(sparse) if sentence.startswith("On average")] == [
        "On average over epochs with and without an exchange, an epoch takes 300 ms with “partial:0.1 + peer” and "
        "600 ms with “global + server”."
    ]
    alone = only(sparse, "global + server")
    assert "On average over epochs with and without an exchange, an epoch takes" in said_of(alone)
    assert "On average" not in said_of(comparison)


def test_overlapping_ranges_are_not_called_faster(comparison):
    comparison = with_seconds(comparison, "global + peer", [9, 0.2, 0.2, 0.2, 0.7])
    alike = with_seconds(comparison, "global + server", [9, 0.25, 0.25, 0.25, 0.25])
    text = said_of(alike)
    assert "use “global + peer” or “global + server”, since the times of their epochs overlap." in text
    assert "times as long" not in text
    # One slow epoch of the fastest does not make a way that is usually three times as slow an equal one.
    assert "about the same" not in said_of(with_seconds(comparison, "global + server", [9, 0.6, 0.6, 0.6, 0.6]))


GOOD, BAD = (1.001, 0.998, 1.0, 1.002, 1.001), (1.2, 1.21, 1.2, 1.19, 1.2)
NOISY, NAN = (1.5, 0.5, 1.4, 0.6, 1.0), float("nan")
ONCE = "local, shuffled once"
BOTH = "with gradients averaged every step; yes with models averaged once an epoch."


@pytest.mark.parametrize(
    ("tested", "answer"),
    [
        ({"unknown": GOOD}, "No: one shuffle before training is enough."),
        ({"models": BAD}, "Yes: one shuffle before training costs +20.0 % of rmse."),
        ({"models": NOISY}, "Cannot tell whether one shuffle before training is enough."),
        ({"gradients": GOOD, "models": GOOD}, "No: one shuffle before training is enough."),
        (
            {"gradients": BAD, "models": BAD},
            "Yes: one shuffle before training costs accuracy with both ways to average.",
        ),
        ({"gradients": GOOD, "models": BAD}, f"Reshuffle? No {BOTH}"),
        ({"gradients": NOISY, "models": BAD}, f"Reshuffle? Cannot tell {BOTH}"),
        ({"models": [NAN] * 5}, "Yes: after one shuffle before training, runs diverge."),
    ],
)
def test_the_answer_has_at_most_15_words(comparison, tested, answer):
    for averages, differences in tested.items():
        comparison = with_pairs(comparison, [ONCE], differences, averages=averages)
    first, *why = story(comparison)
    assert first == answer
    assert len(first.split()) <= 15
    assert sum(ONCE in sentence and "against reshuffling, in rmse" in sentence for sentence in why) == len(tested)


def test_without_one_shuffle_the_answer_is_about_what_was_tested(comparison):
    partial = with_pairs(comparison, ["partial:0.1 + peer"], GOOD)
    assert story(partial)[0] == "No: “partial:0.1 + peer” is enough."
    assert story(with_pairs(comparison, ["partial:0.1 + peer"], BAD))[0] == (
        "Yes: all other strategies that were tested are worse."
    )
    noisy = with_pairs(comparison, ["partial:0.1 + peer"], NOISY)
    assert story(noisy)[0] == "Cannot tell whether another strategy is enough."


def test_why_follows_with_the_other_ways_by_answer(comparison):
    comparison = with_pairs(comparison, ["local, as stored", "partial:0.1 + peer"], BAD, meaning="error on new samples")
    comparison = with_pairs(comparison, [ONCE], GOOD, meaning="error on new samples")
    _, why, *others = story(comparison)
    assert why == (
        "With this training, “local, shuffled once” against reshuffling, in rmse (error on new samples): not worse by "
        "more than 1 %: +0.040 %, at most 0.185 % (95 % confidence, 5 pairs; lower is better). Worse: “local, as "
        "stored” and “partial:0.1 + peer”."
    )
    assert "error on new samples" not in " ".join(others)
    assert "Not tested" not in " ".join(others)


def test_one_of_several_ways_may_be_not_worse_by_chance(comparison):
    """Its bound by itself is below the margin, and not with three strategies at once."""
    close = (1.0, 1.006, 0.996, 1.0098, 1.002)
    alone = with_pairs(comparison, [ONCE], close)
    assert story(alone)[0] == "No: one shuffle before training is enough."
    several = with_pairs(alone, ["local, as stored"], BAD)
    several = with_pairs(several, ["partial:0.1 + peer"], NOISY)
    answer, why, *_ = story(several)
    assert answer == "Cannot tell whether one shuffle before training is enough."
    assert "By itself, “local, shuffled once” is not worse, but with 3 strategies at once that may be chance" in why


def test_ways_that_were_timed_alone_are_said_not_to_be_tested(comparison):
    text = said_of(comparison)
    assert "Not tested: “local, as stored”, “local, shuffled once” and “partial:0.1 + peer”. --pairs 10 tests a" in text
    some = said_of(with_pairs(comparison, [ONCE], GOOD))
    assert "Not tested: “local, as stored” and “partial:0.1 + peer”. A copy in random order, or a sharding" in some


@pytest.mark.parametrize(
    ("values", "of_runs", "words"),
    [
        ((1.0,) * 5, {}, "rmse is the same in every run, so it tests nothing."),
        (NOISY, {}, "The margin is 1 %: take more pairs, or a larger margin."),
        (NOISY, {"test_to_train": 1.0}, "More pairs do not help, because all are drawn from the same"),
        ((NAN, NAN, 1.001, 1.0, 1.002), {}, "It diverged in 2 of 5 pairs, and reshuffling in 0"),
        (GOOD, {"fixed": True}, "All pairs have the same held-out samples, so the answer is about these"),
    ],
)
def test_what_a_test_lacks_is_said(comparison, values, of_runs, words):
    assert words in story(with_pairs(comparison, [ONCE], values, of_runs=of_runs))[1]


@pytest.mark.parametrize(
    ("errors", "start", "options", "sentence"),
    [
        ((0.97, 0.95, 0.93), 1.0, {}, "the error improved by 7.0 % in all, of which 2.0 % in the last epoch: training"),
        ((0.97, 0.95, 0.93), None, {}, "the error improved by 4.1 % in all, of which 2.1 % in the last epoch"),
        ((0.97, 0.95, 0.93), 1.0, {"margin": "3%"}, ""),
        ((0.97, 0.95, 0.93), 1.0, {"margin": 0.03}, ""),  # of a reference whose mean is 1
        ((0.13, 0.12, 0.11), 1.0, {}, ""),  # most was learned in the first epoch
        ((0.97, 0.95, 0.96), 1.0, {}, ""),
        ((NAN,) * 3, 1.0, {}, ""),
        ((0.95, 0.93), 1.0, {}, ""),
    ],
)
def test_a_training_that_has_hardly_begun_is_said(comparison, errors, start, options, sentence):
    """Strategies that have hardly begun to learn do not differ yet."""
    text = said_of(with_pairs(trained(comparison, errors, start), [ONCE], GOOD, **options))
    assert ("hardly begun" in text) == bool(sentence)
    assert f"With reshuffling, {sentence}" in text or not sentence


def trained(comparison, errors, start):
    """The comparison with these errors after the epochs of all strategies."""
    points = tuple(TrainingPoint(epoch=epoch, seconds=1.0 + epoch, error=error) for epoch, error in enumerate(errors))
    ways = tuple(dataclasses.replace(way, history=points) for way in comparison.ways)
    return dataclasses.replace(comparison, ways=ways, error_at_start=start)


def test_without_pairs_nothing_is_enough(comparison):
    """Single runs are told, and no answer is drawn from them."""
    text = said_of(with_error(comparison, ONCE, 1e-8))
    assert DOUBT in text
    assert story(comparison)[0] == UNTESTED
    assert "not worse" not in text
    assert DOUBT not in said_of(with_pairs(comparison, [ONCE], GOOD))


DOUBT = "Single runs do not tell whether their last errors differ by chance."
