from __future__ import annotations

import dataclasses
import re

import pytest

from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.planning import Choices
from dshuffle.report import TrainingPoint, comparison_tables, verdict, verdict_sentences
from dshuffle.report.summary import figures


def only(comparison, *labels):
    return dataclasses.replace(comparison, ways=tuple(way for way in comparison.ways if way.label in labels))


def with_error(comparison, label, error):
    ways = [
        dataclasses.replace(way, history=(*way.history[:-1], dataclasses.replace(way.history[-1], error=error)))
        if way.label == label
        else way
        for way in comparison.ways
    ]
    return dataclasses.replace(comparison, ways=tuple(ways))


def with_seconds(comparison, label, seconds):
    ways = [
        dataclasses.replace(
            way,
            records=tuple(
                dataclasses.replace(record, exchange_seconds=value, epoch_seconds=0.3 + value, waited_seconds=0.0)
                for record, value in zip(way.records, seconds, strict=True)
            ),
        )
        if way.label == label
        else way
        for way in comparison.ways
    ]
    return dataclasses.replace(comparison, ways=tuple(ways))


def test_a_slow_rank_is_the_last_sentence(comparison):
    before = verdict_sentences(comparison)
    ways = [
        dataclasses.replace(
            way,
            records=tuple(dataclasses.replace(record, rank_training_seconds=(0.5, 2.0, 0.5)) for record in way.records),
        )
        if way.label == "global + peer"
        else way
        for way in comparison.ways
    ]
    *others, slow = verdict_sentences(dataclasses.replace(comparison, ways=tuple(ways)))
    assert tuple(others) == before
    assert slow == (
        "With “global + peer”, rank 1 trained 4.0 times as long as the median of the others, which waited 1.50 s an "
        "epoch."
    )


def test_the_first_sentence_answers(comparison):
    for label, seconds in (("global + peer", 0.2), ("global + server", 0.6), ("global + storage", 0.9)):
        comparison = with_seconds(comparison, label, [seconds] * 5)
    answer, times, *_ = verdict_sentences(comparison)
    assert answer == (
        "To reshuffle everything every epoch, use “global + peer” (an epoch takes 2.4 times as long here with "
        "“global + storage”)."
    )
    assert times == (
        "An epoch takes 500 ms with “global + peer”, 900 ms with “global + server”, 1.20 s with “global + "
        "storage” and 310 ms without an exchange. The next exchange runs beside training."
    )
    without = verdict_sentences(only(comparison, "global + peer", "global + server"))[0]
    assert without == (
        "To reshuffle everything every epoch, use “global + peer” (an epoch takes 1.8 times as long here with "
        "“global + server”)."
    )


def test_aligned_ways_reshuffle_everything_too(comparison):
    aligned = dataclasses.replace(comparison.ways[5], label="aligned + clique", choices=Choices("aligned", "clique"))
    both = dataclasses.replace(comparison, ways=(*comparison.ways, aligned))
    assert "“aligned + clique”" in verdict_sentences(with_seconds(both, "aligned + clique", [0.05] * 5))[0]


def test_errors_that_are_not_numbers_say_nothing(comparison):
    for label in ("global + peer", "global + server", "global + storage"):
        comparison = with_error(comparison, label, float("nan"))
    assert "error" not in verdict(comparison)
    assert verdict(comparison).startswith("To reshuffle everything every epoch, use")


def test_auto_is_not_re_reading(comparison):
    auto = dataclasses.replace(comparison.ways[3], label="auto", choices=Choices("global", "auto"))
    comparison = dataclasses.replace(comparison, ways=(comparison.ways[5], auto))
    assert verdict_sentences(comparison)[0].endswith("times as long here with “auto”).")


def test_a_verdict_is_short(comparison):
    tested = with_pairs(comparison, ["local, shuffled once"], GOOD)
    assert len(verdict_sentences(tested)[0].split()) <= 29
    assert len(verdict_sentences(tested)) <= 6
    for chosen in (
        comparison,
        only(comparison, "global + peer"),
        only(comparison, "local, as stored", "global + peer"),
    ):
        answer, *others = verdict_sentences(chosen)
        assert len(answer.split()) <= 25
        assert len(others) <= 3


def test_what_loaders_do_that_re_read_stands_beside(comparison):
    chunks = dataclasses.replace(comparison.ways[3], label="chunks + storage", choices=Choices("chunks", "storage"))
    comparison = dataclasses.replace(comparison, ways=(*comparison.ways, chunks))
    comparison = with_error(with_seconds(comparison, "chunks + storage", [0.1] * 5), "chunks + storage", 0.03)
    sentence = "“chunks + storage” keeps the rows of a chunk together: an epoch takes 400 ms."
    assert "“chunks" not in verdict_sentences(comparison)[0]
    assert verdict_sentences(comparison)[1].endswith(f". {sentence}")


def with_idle(comparison, idle):
    ways = [
        dataclasses.replace(
            way, records=tuple(dataclasses.replace(record, cpu_idle=idle[way.label]) for record in way.records)
        )
        if way.label in idle
        else way
        for way in comparison.ways
    ]
    return dataclasses.replace(comparison, ways=tuple(ways))


def test_times_that_processors_limit_are_doubted(comparison):
    idle = {"global + peer": 0.3, "global + server": 0.16, "global + storage": 0.15}
    assert "processors" not in verdict(with_idle(comparison, idle))
    assert "Processors" not in verdict(with_idle(comparison, idle))
    one = verdict_sentences(with_idle(comparison, idle | {"global + server": 0.1}))[-1]
    assert one.startswith("Processors were idle for less than 15 % of an exchange with “global + server”: they, or")
    whole = verdict_sentences(with_idle(comparison, dict.fromkeys(idle, 0.0)))[-1]
    assert whole.startswith("Processors were idle for less than 15 % of an exchange with all of these ways: they, or")


def test_processors_are_not_blamed_where_a_link_explains_the_time(comparison):
    comparison = with_idle(comparison, {"global + peer": 0.3, "global + server": 0.1, "global + storage": 0.1})
    seconds = {way.label: figures(way).shuffle_seconds.median for way in comparison.ways}

    def said(part):
        ways = [dataclasses.replace(way, predicted_wire_seconds=part * seconds[way.label]) for way in comparison.ways]
        return verdict(dataclasses.replace(comparison, ways=tuple(ways)))

    assert "Processors" not in said(0.51)
    assert "with “global + server” and “global + storage”: they, or" in said(0.49)


def test_local_ways_are_never_the_fastest_shuffle(comparison):
    text = verdict(only(comparison, "local, as stored", "partial:0.1 + peer"))
    assert text.startswith("No way that reshuffles everything ran for two epochs")


def every_second(comparison, *labels):
    """The comparison with ways that have an exchange for every second epoch only."""
    ways = [
        dataclasses.replace(way, choices=dataclasses.replace(way.choices, every=2)) if way.label in labels else way
        for way in comparison.ways
    ]
    return dataclasses.replace(comparison, ways=tuple(ways))


def test_ways_that_reshuffle_every_second_epoch_alone_cannot_be_ranked(comparison):
    sparse = every_second(only(comparison, "local, shuffled once", "global + peer"), "global + peer")
    assert verdict_sentences(sparse)[0] == (
        "No way reshuffles everything before every epoch, so none can be called the fastest. Add one with every=1 "
        "(--every 1)."
    )


def test_the_times_of_ways_that_exchange_for_every_second_epoch_stand_beside(comparison):
    labels = "global + server", "partial:0.1 + peer"
    # Epochs 1 and 3 have no exchange.
    ways = [
        dataclasses.replace(
            way,
            records=tuple(
                dataclasses.replace(record, epoch_seconds=seconds * (2 if way.label == labels[0] else 1))
                for record, seconds in zip(way.records, [9, 0.2, 0.4, 0.2, 0.4], strict=True)
            ),
        )
        if way.label in labels
        else way
        for way in every_second(comparison, *labels).ways
    ]
    sparse = dataclasses.replace(comparison, ways=tuple(ways))
    times = [sentence for sentence in verdict_sentences(sparse) if "An epoch takes" in sentence]
    assert [sentence.split(". ")[-1] for sentence in times] == [
        "On average over epochs with and without an exchange, an epoch takes 300 ms with “partial:0.1 + peer” and "
        "600 ms with “global + server”."
    ]
    alone = only(sparse, "global + server")
    assert "On average over epochs with and without an exchange, an epoch takes" in verdict(alone)
    assert "On average" not in verdict(comparison)


def test_overlapping_ranges_are_not_called_faster(comparison):
    comparison = with_seconds(comparison, "global + peer", [9, 0.2, 0.2, 0.2, 0.7])
    alike = with_seconds(comparison, "global + server", [9, 0.25, 0.25, 0.25, 0.25])
    text = verdict(alike)
    assert "use “global + peer” or “global + server”, whose epochs take about the same time." in text
    assert "times as long" not in text
    # One slow epoch of the fastest does not make a way that is usually three times as slow an equal one.
    assert "about the same" not in verdict(with_seconds(comparison, "global + server", [9, 0.6, 0.6, 0.6, 0.6]))


def test_medians_within_5_percent_are_alike(comparison):
    comparison = only(comparison, "global + peer", "global + server")
    comparison = with_seconds(comparison, "global + peer", [9, 0.70, 0.70, 0.71, 0.71])
    text = verdict(with_seconds(comparison, "global + server", [9, 0.72, 0.72, 0.73, 0.73]))
    assert "use “global + peer” or “global + server”, whose median times differ by less than 5 %." in text
    text = verdict(with_seconds(comparison, "global + server", [9, 0.77, 0.77, 0.77, 0.77]))
    assert "use “global + peer” (an epoch takes 1.1 times as long" in text


def test_without_a_local_way_only_epochs_with_an_exchange_are_told(comparison):
    text = verdict(with_seconds(only(comparison, "global + peer"), "global + peer", [0.2] * 5))
    assert ". An epoch takes 500 ms with “global + peer”. The next exchange runs beside training." in text


def test_times_of_epochs_need_no_history(comparison):
    way = dataclasses.replace(only(comparison, "global + peer").ways[0], history=())
    text = verdict(with_seconds(dataclasses.replace(comparison, ways=(way,)), "global + peer", [0.2] * 5))
    assert "An epoch takes 500 ms with “global + peer”." in text
    assert "error" not in text


GOOD = [0.001, -0.002, 0.0, 0.002, 0.001]
BAD = [0.2, 0.21, 0.2, 0.19, 0.2]


def with_pairs(comparison, label, differences, **options):
    test = PairedTest(**{"metric": "rmse", "margin": "1%", "pairs": 20, **options})
    reference = (1.0,) * max(1, len(differences))
    way = tuple(1.0 + difference for difference in differences)
    runs = PairedRuns(test=test, reference=reference, way=way, null=1.001, repeated=1.0)
    ways = [dataclasses.replace(way, pairs=runs) if way.label in label else way for way in comparison.ways]
    return dataclasses.replace(comparison, ways=tuple(ways))


def test_pairs_are_the_first_answer(comparison):
    comparison = with_pairs(comparison, ["local, as stored"], BAD)
    comparison = with_pairs(comparison, ["local, shuffled once"], GOOD)
    first, use, stored, *_ = verdict_sentences(comparison)
    assert first == (
        "“local, shuffled once” against reshuffling, in rmse: not worse by more than 1 %: on average at most "
        "0.278 % worse (95 % confidence, 5 pairs; lower is better)."
    )
    assert use.startswith("To reshuffle everything every epoch, use “global + peer”")
    assert stored == (
        "“local, as stored” against reshuffling, in rmse: worse by 20.0 % [18.6, 21.4] % "
        "(95 % interval, 5 pairs; lower is better)."
    )


def test_the_metric_is_explained_where_it_first_stands(comparison):
    meaning = "error on a held-out tenth"
    comparison = with_pairs(comparison, ["local, as stored"], BAD, meaning=meaning)
    comparison = with_pairs(comparison, ["local, shuffled once"], GOOD, meaning=meaning)
    first, *others = verdict_sentences(comparison)
    assert first.startswith(f"“local, shuffled once” against reshuffling, in rmse ({meaning}): not worse")
    assert meaning not in " ".join(others)
    assert comparison_tables(comparison)[-1][1].startswith(f"rmse: {meaning}. mean: of rmse over the runs")
    unexplained = with_pairs(comparison, ["local, as stored", "local, shuffled once"], BAD)
    assert comparison_tables(unexplained)[-1][1].startswith("rmse: what the training returns by this name.")


def test_terminal_and_sentence_show_one_bound(comparison):
    tested = with_pairs(with_pairs(comparison, ["local, as stored"], BAD), ["local, shuffled once"], GOOD)
    cells = [[str(cell) for cell in column.cells] for column in comparison_tables(tested)[-1][0].columns]
    assert cells[1:4] == [["1.200", "1.000"], ["+20.0 %", "+0.040 %"], ["[18.6, 21.4] %", "≤ 0.278 %"]]
    text = verdict(tested)
    assert "worse by 20.0 % [18.6, 21.4] %" in text
    assert "on average at most 0.278 % worse" in text


def test_ways_by_chunks_are_chosen_by_the_times_that_are_shown(comparison):
    slow = dataclasses.replace(comparison.ways[3], label="slow", choices=Choices("chunks", "storage"))
    quick = dataclasses.replace(slow, label="quick")
    both = dataclasses.replace(comparison, ways=(*comparison.ways, slow, quick))
    both = with_seconds(with_seconds(both, "slow", [0.1] * 5), "quick", [0.2] * 5)
    # The way with the longer exchange has the shorter epoch.
    ways = [
        dataclasses.replace(
            way, records=tuple(dataclasses.replace(record, epoch_seconds=0.25) for record in way.records)
        )
        if way.label == "quick"
        else way
        for way in both.ways
    ]
    text = verdict(dataclasses.replace(both, ways=tuple(ways)))
    assert "“quick” keeps the rows of a chunk together: an epoch takes 250 ms." in text


@pytest.mark.parametrize(
    ("errors", "start", "options", "sentence"),
    [
        (
            (0.97, 0.95, 0.93),
            1.0,
            {},
            "the error fell by 7.0 % in all, of which 2.0 % in the last epoch: training has har",
        ),
        ((0.97, 0.95, 0.93), None, {}, "the error fell by 4.1 % in all, of which 2.1 % in the last epoch"),
        ((0.97, 0.95, 0.93), 1.0, {"margin": "3%"}, ""),
        ((0.97, 0.95, 0.93), 1.0, {"margin": 0.03}, ""),  # of a reference whose mean is 1
        ((0.13, 0.12, 0.11), 1.0, {}, ""),  # most was learned in the first epoch
        ((0.97, 0.95, 0.96), 1.0, {}, ""),
        ((float("nan"),) * 3, 1.0, {}, ""),
        ((0.95, 0.93), 1.0, {}, ""),
    ],
)
def test_a_training_that_has_hardly_begun_is_said(comparison, errors, start, options, sentence):
    """Ways that have hardly begun to learn do not differ yet."""
    text = verdict(with_pairs(trained(comparison, errors, start=start), ["local, shuffled once"], GOOD, **options))
    assert ("hardly begun" in text) == bool(sentence)
    assert f"With reshuffling, {sentence}" in text or not sentence


@pytest.mark.parametrize(
    ("accuracies", "sentence"),
    [
        (
            (0.7, 0.75, 0.8),
            "accuracy improved by 0.100 in all, of which 0.050 in the last epoch: training has hardly begun",
        ),
        (
            (0.7, 0.66, 0.73),
            "accuracy improved by 0.070 in the last epoch, after it had become worse: training has har",
        ),
        ((0.5, 0.79, 0.8), ""),
        ((0.8, 0.75, 0.7), ""),
    ],
)
def test_the_metric_of_the_pairs_says_whether_training_has_hardly_begun(comparison, accuracies, sentence):
    points = trained(comparison, (0.5,) * 3, [{"accuracy": accuracy} for accuracy in accuracies])
    options = {"metric": "accuracy", "higher_is_better": True, "margin": 0.02}
    text = verdict(with_pairs(points, ["local, shuffled once"], GOOD, **options))
    assert ("hardly begun" in text) == bool(sentence)
    assert f"With reshuffling, {sentence}" in text or not sentence


def trained(comparison, errors, metrics=({},) * 3, start=None):
    """The comparison with these errors, and metrics, after the epochs of all ways."""
    points = tuple(
        TrainingPoint(epoch=epoch, seconds=1.0 + epoch, error=error, validation=metrics[epoch])
        for epoch, error in enumerate(errors)
    )
    ways = tuple(dataclasses.replace(way, history=points) for way in comparison.ways)
    return dataclasses.replace(comparison, ways=ways, error_at_start=start)


def test_pairs_are_told_if_no_way_can_be_ranked(comparison):
    tested = with_pairs(only(comparison, "local, as stored"), ["local, as stored"], BAD)
    first, answer, *_ = verdict_sentences(tested)
    assert "in rmse: worse by 20.0 %" in first
    assert answer.startswith("No way that reshuffles everything ran for two epochs")


def test_ways_that_learn_the_same_share_an_answer(comparison):
    text = verdict(with_pairs(comparison, ["local, as stored", "partial:0.1 + peer"], BAD, margin=0.01))
    assert text.startswith(
        "“local, as stored” and “partial:0.1 + peer” against reshuffling, in rmse: worse by 0.200 [0.18"
    )


def test_a_null_pair_is_told_once_for_all_ways(comparison):
    labels = ("local, as stored", "local, shuffled once")
    for label in labels:
        comparison = with_pairs(comparison, [label], [0.1, -0.1, 0.0, 0.1, len(label) / 100], margin=0.0001)
    text = verdict(comparison)
    assert text.startswith(
        "“local, as stored” and “local, shuffled once” against reshuffling, in rmse: cannot tell: two"
    )
    assert text.count("more pairs do not help.") == text.count("cannot tell") == 1
    note = comparison_tables(comparison)[-1][1]
    assert "The margin is 0.0001." in note


def test_a_test_without_an_answer(comparison):
    [first, *_] = verdict_sentences(with_pairs(comparison, ["local, shuffled once"], [0.5, -0.5] * 10))
    assert first.endswith(
        "in rmse: cannot tell: differences below 27.9 % cannot be seen with 20 pairs, and this one is between 28.0 % "
        "better and 28.0 % worse (95 % interval; lower is better); the margin is 1 %."
    )


@pytest.mark.parametrize("once", [1e-8, 0.21, 0.9])
def test_without_pairs_nothing_is_enough(comparison, once):
    """Single runs are told, and no answer is drawn from them."""
    text = verdict(with_error(comparison, "local, shuffled once", once))
    assert f"after one shuffle and 0.190 in stored order. {DOUBT}" in text
    assert "enough" not in text
    assert "not worse" not in text
    assert DOUBT not in verdict(with_pairs(comparison, ["local, shuffled once"], GOOD))


DOUBT = "Single runs do not tell whether they differ by chance."


def test_without_a_local_way_nothing_is_said_of_worth(comparison):
    text = verdict(with_idle(only(comparison, "global + peer"), {"global + peer": 0.5}))
    assert text.startswith("To reshuffle everything every epoch, use “global + peer”, the only such way that ran. An")
    assert "error" not in text


def test_ways_as_stored_are_doubted_if_the_stored_order_is_random(comparison):
    assert "random order" not in verdict(comparison)
    text = verdict(dataclasses.replace(comparison, stored_at_random=True))
    assert (
        "The dataset is stored in random order, as far as pairs of neighbouring rows show. So “local, as stored” and "
        "“partial:0.1 + peer” start from random shards, too."
    ) in text
    assert "in stored order, which is random." in text
    ways = [
        dataclasses.replace(way, choices=dataclasses.replace(way.choices, sharding="contiguous"))
        for way in comparison.ways
    ]
    contiguous = verdict(dataclasses.replace(comparison, ways=tuple(ways), stored_at_random=True))
    [sentence] = re.findall("So “.*? start from random shards, too", contiguous)
    assert "global" not in sentence, "a new draw over all samples does not depend on the shards"
    sharded = only(comparison, "local, shuffled once", "global + peer")
    assert "random order" not in verdict(dataclasses.replace(sharded, stored_at_random=True))
