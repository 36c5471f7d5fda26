from __future__ import annotations

import dataclasses
import json

import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.pipeline.run import PipelineResult, TrainedWay
from dshuffle.records import EpochRecord
from dshuffle.report import comparison_tables, figures, write_report
from dshuffle.report.tables import (
    QUALITY_HEADINGS,
    STORE_HEADINGS,
    TIME_HEADINGS,
    TRAFFIC_HEADINGS,
    quality_caption,
    quality_cells,
    quality_headings,
    store_cells,
    time_cells,
    traffic_cells,
)
from dshuffle.training import Network, TrainedNetwork


def with_exchange_seconds(way, seconds):
    records = [
        dataclasses.replace(record, exchange_seconds=value) for record, value in zip(way.records, seconds, strict=True)
    ]
    return dataclasses.replace(way, records=tuple(records))


def test_the_first_epoch_is_loaded_and_counts_in_no_median(comparison):
    way = with_exchange_seconds(comparison.ways[-1], [99.0, 0.4, 0.1, 0.2, 0.3])
    found = figures(way)
    assert found.shuffle_seconds is not None
    assert found.shuffle_seconds.median == pytest.approx(0.25)
    assert (found.shuffle_seconds.least, found.shuffle_seconds.greatest) == (0.1, 0.4)
    assert found.needed == 75_000
    assert found.store_requests == 0
    assert found.wire_bytes == sum(way.records[1].wire_received_bytes)
    assert found.first_error == way.history[0].error
    assert found.last_error == way.history[-1].error
    assert found.epoch_seconds == pytest.approx(0.3 + 0.2)


def test_a_way_of_one_epoch_has_errors_and_no_medians(comparison):
    way = comparison.ways[-1]
    short = dataclasses.replace(way, records=way.records[:1], history=way.history[:1])
    found = figures(short)
    assert found.shuffle_seconds is None
    assert found.training_seconds is None
    assert found.epoch_seconds is None
    assert found.last_error == found.first_error == 0.6
    assert time_cells(short) == ("-",) * len(TIME_HEADINGS)
    assert traffic_cells(short) == ("-",) * len(TRAFFIC_HEADINGS)


def test_storage_and_processors(comparison):
    storage, peer = comparison.ways[3], comparison.ways[5]
    twice = [
        dataclasses.replace(record, store_bytes=2 * record.store_delivered_bytes, store_requests=80, store_seconds=0.4)
        for record in storage.records
    ]
    way = dataclasses.replace(storage, records=tuple(twice))
    assert store_cells(way)[1:] == ("2.0", "80", "200")
    assert store_cells(peer) == ("0 B", "-", "0", "-")
    assert time_cells(storage)[4] == "40 %"
    assert time_cells(peer)[4] == "10 % !"
    local = comparison.ways[0]
    assert time_cells(local)[4] == "10 %", "nothing moves, so nothing limits it"
    assert traffic_cells(storage)[1:3] == ("0", "0 B"), "what is read is not sent"


def test_quality_is_shown_as_far_as_it_is_known(comparison):
    way = comparison.ways[0]
    assert quality_cells(way) == ("0.88", "0.25", "1.00", "3.86", "-")
    unknown = dataclasses.replace(way.quality, meets_again=None, class_spread=None)
    assert quality_cells(dataclasses.replace(way, quality=unknown)) == ("-", "0.25", "1.00", "-", "-")
    assert quality_cells(dataclasses.replace(way, quality=None)) == ("-",) * 5


def test_ways_with_one_label_are_refused(comparison):
    with pytest.raises(InvalidParameter, match="different labels"):
        dataclasses.replace(comparison, ways=(comparison.ways[0], comparison.ways[0]))


def test_every_way_has_a_row_in_every_table_and_fits_80_columns(comparison, capsys):
    tables = [table for table, _ in comparison_tables(comparison)]
    assert [table.row_count for table in tables] == [6] * 5
    headings = (TIME_HEADINGS[1:], TRAFFIC_HEADINGS, STORE_HEADINGS, QUALITY_HEADINGS[1:], range(5))
    assert [len(table.columns) for table in tables] == [1 + len(each) for each in headings]
    console = pytest.importorskip("rich.console").Console(width=80)
    for table in tables:
        console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert sum("local, shuffled once" in line for line in lines) == 5, "labels must not wrap"
    assert "…" not in "".join(lines)


@pytest.mark.slow
def test_neighbour_distances_are_shown_if_they_differ_from_random(comparison, tmp_path):
    quality = comparison.ways[0].quality
    stored = dataclasses.replace(comparison.ways[0], quality=dataclasses.replace(quality, neighbour_distance=0.33))
    differs = dataclasses.replace(comparison, ways=(stored, *comparison.ways[1:]))
    assert "neighbour distance" not in quality_headings(comparison)
    assert quality_headings(differs) == QUALITY_HEADINGS
    for compared, shown in ((comparison, False), (differs, True)):
        headings = quality_headings(compared)
        assert len(quality_cells(compared.ways[0], headings)) == len(headings)
        assert ("neighbour distance" in quality_caption(compared)) is shown
        assert ("neighbour distance" in write_report(compared, tmp_path).read_text()) is shown
    assert quality_cells(stored)[2] == "0.33"


def test_each_note_is_below_its_table_and_explains_the_marks(comparison):
    emulated = dataclasses.replace(comparison, emulated="links of 4 Mbit/s")
    notes = {table.title: note for table, note in comparison_tables(emulated)}
    assert notes["Seconds"].startswith("Emulated: links of 4 Mbit/s. ")
    assert notes["Storage"].startswith("Emulated: links of 4 Mbit/s. ")
    assert "never if no sample moves, and - if" in notes["Mixing"]
    assert "Emulated" not in "".join(note for _, note in comparison_tables(comparison))


def test_labels_are_no_markup(comparison, capsys):
    way = dataclasses.replace(comparison.ways[0], label="[red]x[/red]")
    pytest.importorskip("rich.console").Console(width=80).print(
        comparison_tables(dataclasses.replace(comparison, ways=(way,)))[0][0]
    )
    assert "[red]x[/red]" in capsys.readouterr().out


def test_the_files_hold_every_record_and_the_figures(comparison, tmp_path):
    page = write_report(comparison, tmp_path / "new" / "folder")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    lines = (page.parent / "records.jsonl").read_text().splitlines()
    assert len(lines) == 30
    loaded = [json.loads(line) for line in lines]
    assert [line["way"] for line in loaded[::5]] == [way.label for way in comparison.ways]
    del loaded[7]["way"]
    assert EpochRecord.from_json(json.dumps(loaded[7])) == comparison.ways[1].records[2]
    summary = json.loads((page.parent / "summary.json").read_text())
    assert summary["seed"] == 7
    assert summary["command"] == comparison.command
    assert summary["ways"][5]["figures"]["needed"] == 75_000
    assert summary["ways"][0]["quality"]["class_spread"] == 3.859
    assert [point["epoch"] for point in summary["ways"][0]["history"]] == [0, 1, 2, 3, 4]
    assert [line["error"] for line in loaded[:5]] == [point.error for point in comparison.ways[0].history]
    assert "validation" not in loaded[0]
    assert write_report(comparison, page.parent) == page, "a second report replaces the first"


def test_records_have_what_training_reported(comparison, tmp_path):
    first, *others = comparison.ways
    points = [
        dataclasses.replace(point, error=float("nan"), validation={"rmse": 1.5 + point.epoch})
        for point in first.history[:3]
    ]
    way = dataclasses.replace(first, history=tuple(points))
    write_report(dataclasses.replace(comparison, ways=(way, *others)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()][:5]
    assert [line.get("validation") for line in lines] == [{"rmse": 1.5}, {"rmse": 2.5}, {"rmse": 3.5}, None, None]
    assert [line.get("error", "none") for line in lines] == [None, None, None, "none", "none"]


@pytest.mark.slow
def test_a_report_that_cannot_be_completed_leaves_the_old_one(comparison, tmp_path, monkeypatch):
    page = write_report(comparison, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dshuffle.report.files.write_records", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(comparison, page.parent)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_results_are_short(comparison):
    assert repr(comparison).startswith("<Comparison of “local, as stored”, “local, shuffled once”, ")
    shown = comparison._repr_html_()
    assert shown.count("<tr>") == len(comparison.ways) + 3
    assert "global + peer" in shown
    network = Network((4, 8, 3))
    trained = TrainedNetwork(network, network.first_parameters(0), network.first_statistics())
    assert repr(trained) == f"<TrainedNetwork (4, 8, 3), {len(trained.parameters)} parameters>"
    result = PipelineResult((TrainedWay("global + peer", trained, (), 3),), None)
    assert "<td>global + peer</td><td>3</td>" in result._repr_html_()
