from __future__ import annotations

import dataclasses

import pytest

from dshuffle.planning import Choices
from dshuffle.report import verdict, verdict_sentences
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
                dataclasses.replace(record, exchange_seconds=value, waited_seconds=0.0)
                for record, value in zip(way.records, seconds, strict=True)
            ),
        )
        if way.label == label
        else way
        for way in comparison.ways
    ]
    return dataclasses.replace(comparison, ways=tuple(ways))


def test_the_first_sentence_answers(comparison):
    for label, seconds in (("global + peer", 0.2), ("global + server", 0.6), ("global + storage", 0.9)):
        comparison = with_seconds(comparison, label, [seconds] * 5)
    answer, times, *_ = verdict_sentences(comparison)
    assert answer == (
        "One shuffle before training is enough here; if you reshuffle every epoch, use “global + peer” (4.5 times as "
        "fast here as “global + storage”)."
    )
    assert times == (
        "An exchange takes 200 ms with “global + peer”, 600 ms with “global + server” and 900 ms with “global + "
        "storage”. An epoch takes 500 ms with “global + peer”, and 310 ms without an exchange."
    )
    without = verdict_sentences(only(comparison, "global + peer", "global + server"))[0]
    assert without == (
        "To reshuffle everything every epoch, use “global + peer” (3.0 times as fast here as “global + server”)."
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
    assert verdict_sentences(comparison)[0].endswith("times as fast here as “auto”).")


def test_a_verdict_is_short(comparison):
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
    told = "“chunks + storage” keeps the rows of a chunk together, and takes 100 ms."
    assert "“chunks" not in verdict_sentences(comparison)[0]
    assert verdict_sentences(comparison)[1].endswith(f". {told}")


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
    assert one.startswith("Processors were idle for less than 15 % of the time with “global + server”: they limit")
    whole = verdict_sentences(with_idle(comparison, dict.fromkeys(idle, 0.0)))[-1]
    assert whole.startswith("Processors were idle for less than 15 % of the time with all of these ways: they limit")


def test_processors_are_not_blamed_where_a_link_explains_the_time(comparison):
    comparison = with_idle(comparison, {"global + peer": 0.3, "global + server": 0.1, "global + storage": 0.1})
    seconds = {way.label: figures(way).shuffle_seconds.median for way in comparison.ways}

    def said(part):
        ways = [dataclasses.replace(way, predicted_wire_seconds=part * seconds[way.label]) for way in comparison.ways]
        return verdict(dataclasses.replace(comparison, ways=tuple(ways)))

    assert "Processors" not in said(0.51)
    assert "with “global + server” and “global + storage”: they limit" in said(0.49)


def test_local_ways_are_never_the_fastest_shuffle(comparison):
    text = verdict(only(comparison, "local, as stored", "partial:0.1 + peer"))
    assert text.startswith("No way that reshuffles everything ran for two epochs")


def test_overlapping_ranges_are_not_called_faster(comparison):
    comparison = with_seconds(comparison, "global + peer", [9, 0.2, 0.2, 0.2, 0.7])
    alike = with_seconds(comparison, "global + server", [9, 0.25, 0.25, 0.25, 0.25])
    text = verdict(alike)
    assert "use “global + peer” or “global + server”, whose times overlap." in text
    assert "times as fast" not in text
    # One slow epoch of the fastest does not make a way that is usually three times as slow an equal one.
    assert "times overlap" not in verdict(with_seconds(comparison, "global + server", [9, 0.6, 0.6, 0.6, 0.6]))


def test_without_a_local_way_the_wait_is_told(comparison):
    assert ". Training waits for 0 s of it." in verdict(
        with_seconds(only(comparison, "global + peer"), "global + peer", [0.2] * 5)
    )


def test_one_shuffle_that_is_enough_is_told(comparison):
    text = verdict(with_error(comparison, "local, shuffled once", 5e-7))
    assert text.startswith("One shuffle before training is enough here"), "both are rounding"
    assert "the error is 9.6e-08 with reshuffling, 5e-07 after one shuffle and 0.19 in stored order." in text


@pytest.mark.parametrize(
    ("once", "says"),
    [
        (0.21, "One shuffle before training is enough here; if you reshuffle every epoch, use"),
        (0.4, "Reshuffling every epoch pays here: use “global + peer”"),
        (0.1, "One shuffle before training is enough here; if you reshuffle every epoch, use"),
    ],
)
def test_what_reshuffling_was_worth(comparison, once, says):
    comparison = with_error(comparison, "local, as stored", 0.9)
    for label in ("global + peer", "global + server", "global + storage"):
        comparison = with_error(comparison, label, 0.2)
    assert verdict(with_error(comparison, "local, shuffled once", once)).startswith(says)


def test_data_that_need_no_shuffling(comparison):
    text = verdict(with_error(comparison, "local, as stored", 1e-8))
    assert text.startswith("These data need no shuffling; if you reshuffle every epoch, use")


def test_without_a_local_way_nothing_is_said_of_worth(comparison):
    text = verdict(with_idle(only(comparison, "global + peer"), {"global + peer": 0.5}))
    assert text.startswith("To reshuffle everything every epoch, use “global + peer”, the only such way that ran. An")
    assert "error" not in text
