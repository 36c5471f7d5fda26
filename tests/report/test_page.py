"""The report as a page and as text: one table of figures, three charts, and nothing loaded from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices
from dshuffle.records import EpochRecord
from dshuffle.report import TrainingPoint, render_html, render_text, story, write_report
from dshuffle.report.page import COLUMNS, names_of, tables_of
from dshuffle.training import Network, TrainedNetwork
from dshuffle.units import NO_BREAK

from . import conftest
from .conftest import changed


class Page(HTMLParser):
    """Collects text outside styles, tags, and attributes that make a browser load something."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.tags, self.texts, self.inside = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "style":
            self.inside.append(tag)
        self.loads += [(tag, name) for name, _ in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace(NO_BREAK, " ").split())


def table(comparison, title):
    [found] = [one for one in tables_of(comparison) if one.title == title]
    return found


def cells(comparison, title, label):
    found = table(comparison, title)
    return dict(zip(found.headings, found.rows[label], strict=True))


def with_pairs(comparison, label, way, **options):
    return conftest.with_pairs(
        comparison, [label], way, **{"averages": "models", "metric": "loss", "margin": 0.1, **options}
    )


def test_the_page_loads_nothing(comparison):
    page = render_html(comparison)
    parsed = Page(page)
    assert parsed.loads == []
    assert {"link", "script"}.isdisjoint(parsed.tags)
    for style in re.findall(r"<style>(.*?)</style>", page, re.S):
        assert "url(" not in style
        assert "@import" not in style
    assert len(page) < 100_000


def test_page_and_terminal_say_the_same(comparison):
    tested = with_pairs(comparison, "local, shuffled once", (1.01, 1.0, 0.99, 1.0, 1.01))
    page = Page(render_html(tested)).text.replace("\u2011", "-")
    text = " ".join(render_text(tested).split())
    for sentence in (*story(tested), *names_of(tested).values(), *(way.label for way in tested.ways)):
        assert sentence in page
        assert sentence in text
    first = tables_of(tested)[0]
    assert first.headings[0] == "loss, models averaged"
    for row in first.rows.values():
        assert all(cell in page and cell in text for cell in row)
    for fact in (tested.command, "2026.8.0", "/data/keyed.zarr", "Linux 6.1", "seed 7", "0.02"):
        assert fact in page
    assert page.index(story(tested)[0]) < page.index("epoch exchange waited")
    assert text.startswith(story(tested)[0])


def test_every_line_of_the_terminal_fits(comparison):
    tested = with_pairs(comparison, "local, shuffled once", (1.01, 1.0, 0.99, 1.0, 1.01), averages="gradients")
    tested = with_pairs(tested, "local, shuffled once", (1.01, 1.0, 0.99, 1.0, 1.01))
    for width in (80, 120):
        text = render_text(tested, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text


def test_all_text_is_escaped(comparison):
    evil = "<script>alert(1)</script><img src=x>"
    comparison = changed(comparison, [comparison.ways[0].label], label=evil)
    comparison = with_pairs(comparison, evil, (1.0,) * 4 + (1.1,), metric=evil, higher_is_better=False)
    page = render_html(dataclasses.replace(comparison, command=evil, dataset={evil: evil}, machine={"a": evil}))
    assert "<script" not in page
    assert "<img" not in page
    assert Page(page).loads == []


def test_every_way_is_in_every_table_and_chart(comparison):
    comparison = with_pairs(comparison, "local, as stored", (1.3, 1.31, 1.3, 1.29, 1.3))
    for title in ("", *COLUMNS, "After each epoch, error"):
        assert list(table(comparison, title).rows) == [way.label for way in comparison.ways]
    page = render_html(comparison)
    bars, pairs, errors = page.split("<figure>")[1:]
    assert bars.count('class="row"') == len(comparison.ways)
    assert pairs.count('class="row"') == 1
    assert errors.count("<polyline") == len(comparison.ways)


def test_times_are_medians_of_the_epochs_after_the_first(comparison):
    way = comparison.ways[-1]
    records = [
        dataclasses.replace(record, exchange_seconds=value)
        for record, value in zip(way.records, [99.0, 0.4, 0.1, 0.2, 0.3], strict=True)
    ]
    found = cells(changed(comparison, [way.label], records=tuple(records)), "Times", way.label)
    assert (found["exchange"], found["range"], found["epoch"]) == ("250 ms", "100 ms to 400 ms", "500 ms")
    short = changed(comparison, [way.label], records=way.records[:1])
    assert {*cells(short, "Times", way.label).values()} == {"-"}
    found = way.figures
    assert found.wire_bytes == sum(way.records[1].wire_received_bytes)


def test_storage_and_processors(comparison):
    storage = comparison.ways[3]
    twice = [
        dataclasses.replace(record, store_bytes=2 * record.store_delivered_bytes, store_requests=80, store_seconds=0.4)
        for record in storage.records
    ]
    comparison = changed(comparison, [storage.label], records=tuple(twice))
    found = cells(comparison, "Traffic", storage.label)
    assert [found[name] for name in ("read amplification", "requests", "requests/s")] == ["2.0", "80", "200"]
    assert [found[name] for name in ("packets", "bytes sent")] == ["0", "0 B"], "what is read is not sent"
    found = cells(comparison, "Traffic", "global + peer")
    assert [found[name] for name in ("bytes read", "read amplification", "requests")] == ["0 B", "-", "0"]
    idle = [cells(comparison, "Times", way.label)["idle CPU"] for way in comparison.ways]
    assert idle[3:] == ["40 %", "10 % !", "10 % !"]
    assert idle[0] == "10 %", "nothing moves, so nothing limits it"


def test_ways_with_one_label_are_refused(comparison):
    with pytest.raises(InvalidParameter, match="different labels"):
        dataclasses.replace(comparison, ways=(comparison.ways[0], comparison.ways[0]))


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_comparison_with_hardly_any_epochs_is_still_a_page(comparison, epochs):
    ways = [
        dataclasses.replace(way, records=way.records[:epochs], history=way.history[:epochs]) for way in comparison.ways
    ]
    assert "</html>" in render_html(dataclasses.replace(comparison, ways=tuple(ways)))


def test_without_a_history_nothing_is_empty(comparison):
    """A function that returns a dict reports no errors. Epochs and their times are recorded all the same."""
    ways = tuple(dataclasses.replace(way, history=()) for way in comparison.ways)
    plain = Page(render_html(dataclasses.replace(comparison, ways=ways))).text
    assert "5 epochs per strategy" in plain
    assert "rror against time" not in plain
    assert "last error" not in plain
    # Points that have no error, but a metric.
    points = tuple(TrainingPoint(epoch=e, seconds=e, error=math.nan, validation={"<rmse>": 1.5 + e}) for e in range(5))
    metrics = changed(dataclasses.replace(comparison, ways=ways), [ways[0].label], history=points)
    assert "After each epoch, error" not in [one.title for one in tables_of(metrics)]
    found = table(metrics, "After each epoch, <rmse>").rows
    assert found[ways[0].label] == ("1.500", "2.500", "3.500", "4.500", "5.500")
    assert found[ways[1].label] == ("-",) * 5
    assert "After each epoch, &lt;rmse&gt;" in render_html(metrics)


def test_pairs_are_drawn_on_an_axis_around_the_answer(comparison):
    label = "local, shuffled once"
    tested = with_pairs(comparison, label, (1.01, 1.02, 0.99, 1.0, 9.0))
    pairs = render_html(tested).split("<h2>Pairs of runs")[1].split("</figure>")[0]
    marks = re.findall(r'<s class="w1( beyond)?" style="left:([\d.]+)%;top:(\d+)px" title="([^"]+)"', pairs)
    assert [text for *_, text in marks] == ["-0.0100", "+0.00", "+0.0100", "+0.0200", "+8.00"]
    assert [bool(beyond) for beyond, *_ in marks] == [False] * 5, "the pairs of the answer are all shown"
    zero, margin = (float(re.search(rf'class="{name}" style="left:([\d.]+)%', pairs)[1]) for name in ("zero", "margin"))
    assert zero < margin < float(marks[-1][1])
    other = with_pairs(tested, "local, as stored", (90.0, 91.0, 90.0, 92.0, 90.0))
    pairs = render_html(other).split("<h2>Pairs of runs")[1].split("</figure>")[0].replace(NO_BREAK, " ")
    assert pairs.count("beyond") == 1, "a row without marks is one line"
    ticks = [float(shown) for shown in re.findall(r"%\">([^<]+)</span>", pairs.split('class="axis"')[1])]
    assert 3 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert "5 pairs beyond the axis, mean +89.6" in pairs
    cut = table(other, "Pairs of runs, loss, models averaged").rows
    assert cut["local, as stored"][:2] == ("90.60", "+89.6")
    assert cut["local, as stored"][3:] == ("5", "worse")


@pytest.mark.parametrize("margin", [0.1, "10%"])
@pytest.mark.parametrize(
    "values",
    [
        {"way": (math.nan,) * 5},
        {"way": (1.01,) * 5, "reference": (math.nan,) * 5},
        {"way": (1e30, 2e30, 1e30, 3e30, 1e30)},
        {"way": (1.01,)},
        {"way": ()},
    ],
)
def test_ways_without_differences_or_bounds_have_a_report(comparison, values, margin):
    """It diverged, or ran once."""
    tested = with_pairs(comparison, "local, as stored", margin=margin, **values)
    page = render_html(tested)
    assert not re.search(r"(left|width):-?(nan|inf)", page)
    assert "Pairs of runs" in page
    assert "Pairs of runs, loss" in render_text(tested)


def test_names_are_explained(comparison):
    names = names_of(comparison)
    assert names["local, as stored"].endswith("the same consecutive part of the dataset as it is stored")
    assert names["partial:0.1 + peer"] == (
        "each worker exchanges the fraction 0.1 of its samples in every epoch, and begins with a consecutive part of "
        "the dataset; workers send the samples to each other"
    )
    way = dataclasses.replace(comparison.ways[-1], label="w", choices=Choices("aligned", "clique", None, 0.5, every=2))
    assert names_of(dataclasses.replace(comparison, ways=(way,)))["w"] == (
        "a nearly random partition in every epoch, made for coded packets; a server sends packets that are XORs of "
        "samples, and each worker holds 50 % of the dataset; an exchange for every 2 epochs only"
    )


def test_every_column_has_a_meaning(comparison):
    page = Page(render_html(comparison)).text
    told = {"by the server", "bytes read", "requests", "requests/s"}  # as their names say
    for heading in {name for part in COLUMNS.values() for name in part} - told:
        assert f"{heading}: " in page


def test_the_files_hold_every_record_and_the_figures(comparison, tmp_path):
    comparison = with_pairs(comparison, "local, as stored", (1.3, 1.31, 1.3, 1.29, 1.3))
    page = write_report(comparison, tmp_path / "new" / "folder")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    lines = (page.parent / "records.jsonl").read_text().splitlines()
    assert len(lines) == 30
    loaded = [json.loads(line) for line in lines]
    assert [line["way"] for line in loaded[::5]] == [way.label for way in comparison.ways]
    del loaded[7]["way"]
    assert EpochRecord.from_json(json.dumps(loaded[7])) == comparison.ways[1].records[2]
    summary = json.loads((page.parent / "summary.json").read_text())
    assert summary["answer"] == story(comparison)[0]
    assert summary["verdict"] == " ".join(story(comparison))
    assert summary["ways"][0]["pairs"]["models"]["outcome"] == "worse"
    assert summary["ways"][5]["pairs"] == {}
    assert summary["seed"] == 7
    assert summary["command"] == comparison.command
    assert summary["ways"][5]["figures"]["needed"] == 75_000
    assert [point["epoch"] for point in summary["ways"][0]["history"]] == [0, 1, 2, 3, 4]
    assert [line["error"] for line in loaded[:5]] == [point.error for point in comparison.ways[0].history]
    assert "validation" not in loaded[0]
    assert write_report(comparison, page.parent) == page, "a second report replaces the first"


def test_a_report_that_cannot_be_completed_leaves_the_old_one(comparison, tmp_path, monkeypatch):
    page = write_report(comparison, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dshuffle.report.page.records_of", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(comparison, page.parent)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_results_are_short(comparison):
    assert repr(comparison).startswith("<Comparison of “local, as stored”, “local, shuffled once”, ")
    network = Network((4, 8, 3))
    trained = TrainedNetwork(network, network.first_parameters(0), network.first_statistics())
    assert repr(trained) == f"<TrainedNetwork (4, 8, 3), {len(trained.parameters)} parameters>"
