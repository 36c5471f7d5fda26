from __future__ import annotations

import dataclasses

import pytest

from dshuffle.planning import Choices
from dshuffle.report import verdict, verdict_sentences


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


def test_the_fastest_global_way_is_named_with_ratios(comparison):
    for label, seconds in (("global + peer", 0.2), ("global + server", 0.6), ("global + storage", 0.9)):
        comparison = with_seconds(comparison, label, [seconds] * 5)
    assert verdict(comparison).startswith(
        "“global + peer” took 200 ms an epoch to reshuffle everything (epochs took 500 ms with it, 310 ms without): "
        "3.0 times as fast as “global + server” and 4.5 times as fast as “global + storage”."
    )


def test_what_loaders_do_that_re_read_stands_beside(comparison):
    chunks = dataclasses.replace(comparison.ways[3], label="chunks + storage", choices=Choices("chunks", "storage"))
    comparison = dataclasses.replace(comparison, ways=(*comparison.ways, chunks))
    comparison = with_error(with_seconds(comparison, "chunks + storage", [0.1] * 5), "chunks + storage", 0.03)
    told = "“chunks + storage”, which keeps the rows of a chunk together, took 100 ms and reached an error of 0.03."
    assert verdict(comparison).startswith("“global + peer” took")
    assert verdict_sentences(comparison)[0].endswith(f"; {told}")
    assert verdict_sentences(only(comparison, "global + peer", "chunks + storage"))[0].endswith(f"so was run; {told}")


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
    one = verdict_sentences(with_idle(comparison, idle | {"global + server": 0.1}))[1]
    assert one.startswith("Processors were idle for less than 15 % of the time under “global + server”: such times")
    whole = verdict_sentences(with_idle(comparison, dict.fromkeys(idle, 0.0)))[1]
    assert whole.startswith("Processors were idle for less than 15 % of the time under all of these ways: such times")


def test_local_ways_are_never_the_fastest_shuffle(comparison):
    text = verdict(only(comparison, "local, as stored", "partial:0.1 + peer"))
    assert text.startswith("No way with the assignment “global” was run")


def test_overlapping_ranges_are_not_called_faster(comparison):
    comparison = with_seconds(comparison, "global + peer", [9, 0.2, 0.2, 0.2, 0.7])
    comparison = with_seconds(comparison, "global + server", [9, 0.6, 0.6, 0.6, 0.6])
    text = verdict(comparison)
    assert "not clearly faster than “global + server” (600 ms), whose times are in the same range" in text
    assert "times as fast as “global + storage”" in text


def test_without_a_local_way_the_wait_is_told(comparison):
    assert "(training stood still for 0 s of it)" in verdict(
        with_seconds(only(comparison, "global + peer"), "global + peer", [0.2] * 5)
    )


def test_one_shuffle_that_is_enough_is_told(comparison):
    text = verdict(with_error(comparison, "local, shuffled once", 5e-7))
    assert "one shuffle before training reached the same error" in text, "both are rounding"
    assert "not worth its cost" in text
    assert text.endswith("with every sample left where it is stored the error was 0.19.")


@pytest.mark.parametrize(
    ("once", "says"),
    [
        (0.21, "reached the same error"),
        (0.4, "reshuffling every epoch paid: its error of 0.2 is 2.0 times smaller than the 0.4"),
        (0.1, "did better than reshuffling every epoch (0.1 against 0.2)"),
    ],
)
def test_what_reshuffling_was_worth(comparison, once, says):
    for label in ("global + peer", "global + server", "global + storage"):
        comparison = with_error(comparison, label, 0.2)
    assert says in verdict(with_error(comparison, "local, shuffled once", once))


def test_data_that_need_no_shuffling(comparison):
    text = verdict(with_error(comparison, "local, as stored", 1e-8))
    assert "these data need no shuffling" in text


def test_without_a_local_way_nothing_is_said_of_worth(comparison):
    text = verdict(with_idle(only(comparison, "global + peer"), {"global + peer": 0.5}))
    assert text.endswith("; no other way of doing so was run.")
