from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from bokeh.models.annotations import LabelSet

from dshuffle.noninferiority import PairedRuns, PairedTest
from dshuffle.report import TrainingPoint, comparison_tables, render_html, verdict_sentences
from dshuffle.report.charts import charts
from dshuffle.report.colours import DARK, DARK_COLOURS, LIGHT, MIDDLE, WAY_COLOURS
from dshuffle.report.pair_chart import pair_chart
from dshuffle.units import NO_BREAK


class Page(HTMLParser):
    """Collects text outside scripts and styles, tags, and attributes that make a browser load something."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.tags, self.texts, self.inside = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("script", "style"):
            self.inside.append(tag)
        self.loads += [(tag, name) for name, _ in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.texts.append(data)


def test_the_page_loads_nothing(comparison):
    page = render_html(comparison)
    parsed = Page(page)
    assert parsed.loads == []
    assert "link" not in parsed.tags
    for style in re.findall(r"<style>(.*?)</style>", page, re.S):
        assert "url(" not in style
        assert "@import" not in style
    assert len(page) < 3_000_000


def test_the_page_says_what_was_measured(comparison):
    text = " ".join(Page(render_html(comparison)).texts)
    for sentence in verdict_sentences(comparison):
        assert sentence.replace("e-", "e\u2011") in text.replace(NO_BREAK, " ")
    for way in comparison.ways:
        assert way.label in text
    for fact in (comparison.command, "2026.8.0", "/data/keyed.zarr", "Linux 6.1", "seed 7", "0.02", "3.86"):
        assert fact in text
    assert "prefers-color-scheme: dark" in render_html(comparison)


@pytest.mark.slow
def test_exchanges_on_other_links_are_shown_where_they_are_predicted(comparison):
    assert "other links" not in render_html(comparison)
    ways = [dataclasses.replace(way, on_other_links={"1 Gbit/s": 1.23, "<10>": 0.5}) for way in comparison.ways[1:]]
    page = render_html(dataclasses.replace(comparison, ways=(comparison.ways[0], *ways)))
    section = page.split("An exchange on other links")[1].split("</section>")[0].replace(NO_BREAK, " ")
    moving = [way for way in ways if way.label != "local, shuffled once"]  # which has no exchange
    assert section.count("1.23 s") == len(moving)
    assert "&lt;10&gt;" in section
    assert "local" not in section


def test_exchanges_on_other_links_are_marked_if_processors_were_busy(comparison):
    ways = [dataclasses.replace(way, on_other_links={"1 Gbit/s": 0.5}) for way in comparison.ways[3:]]
    page = render_html(dataclasses.replace(comparison, ways=tuple(ways)))
    section = page.split("An exchange on other links")[1].split("</section>")[0].replace(NO_BREAK, " ")
    # Idle CPU: 40 % with global + storage, and 10 % with the other two.
    assert re.findall(r"<span>([^<]+)</span></span></th>", section) == [
        "global + storage",
        "global + server *",
        "global + peer *",
    ]
    assert "* The processors were idle for less than 15 %" in section
    idle = [
        dataclasses.replace(way, records=tuple(dataclasses.replace(record, cpu_idle=0.4) for record in way.records))
        for way in ways
    ]
    section = render_html(dataclasses.replace(comparison, ways=tuple(idle))).split("An exchange on other links")[1]
    assert "*" not in section.split("</section>")[0]


def test_all_text_is_escaped(comparison):
    evil = "<script>alert(1)</script><img src=x>"
    ways = (dataclasses.replace(comparison.ways[0], label=evil), *comparison.ways[1:])
    page = render_html(
        dataclasses.replace(comparison, ways=ways, command=evil, dataset={evil: evil}, machine={"a": evil})
    )
    assert "<script>alert" not in page
    assert "<img" not in page
    assert Page(page).loads == []


def test_every_way_is_in_every_chart(comparison):
    labels = {way.label for way in comparison.ways}
    drawn = {chart.title: chart for chart in charts(comparison)}
    assert len(drawn) == 5
    for title in ("Time per epoch", "Where an exchange spends its time", "Bytes per epoch"):
        assert set(drawn[title].figure.y_range.factors) == labels
    for title in ("Error after each epoch", "Error against time"):
        assert {meaning for _, meaning in drawn[title].key} == labels
        lines = [item.data_source.data for item in drawn[title].figure.renderers if "Line" in str(item.glyph)]
        assert [list(line["error"]) for line in lines] == [
            [point.error for point in way.history] for way in comparison.ways
        ]


@pytest.mark.slow
def test_without_a_history_nothing_is_empty(comparison):
    """A function that returns a dict reports no errors. Epochs and their times are recorded all the same."""
    ways = tuple(dataclasses.replace(way, history=()) for way in comparison.ways)
    plain = dataclasses.replace(comparison, ways=ways)
    assert [chart.title for chart in charts(plain)] == [
        "Time per epoch",
        "Where an exchange spends its time",
        "Bytes per epoch",
    ]
    text = " ".join(Page(render_html(plain)).texts)
    assert "5 epochs per way" in text
    for absent in ("last error", "Error a", "in numbers"):
        assert absent not in text
    assert "last error" in " ".join(Page(render_html(comparison)).texts)
    assert "Error after each epoch" not in [table.title for table, _ in comparison_tables(plain)]
    times = charts(plain)[0].figure.center[-1].source.data
    assert times["text"][times["way"].index("global + peer")].startswith("500 ms")
    # Points that have no error, but a metric.
    points = tuple(TrainingPoint(epoch=e, seconds=e, error=float("nan"), validation={"loss": 1.5}) for e in range(5))
    metrics = dataclasses.replace(comparison, ways=tuple(dataclasses.replace(way, history=points) for way in ways))
    text = " ".join(Page(render_html(metrics)).texts)
    assert "last error" not in text
    assert "nan" not in text.split("in numbers")[1]
    assert "loss after each epoch" in [table.title for table, _ in comparison_tables(metrics)]


def test_the_caption_says_what_the_error_is(comparison):
    drawn = {chart.title: chart.caption for chart in charts(comparison)}
    assert drawn["Error after each epoch"].startswith("The error that the training function reports, on a log")
    regression = dataclasses.replace(comparison, error_meaning="the relative residual")
    assert {chart.title: chart.caption for chart in charts(regression)}["Error after each epoch"].startswith(
        "The relative residual, on a logarithmic scale."
    )
    assert [note for table, note in comparison_tables(regression) if "Error" in table.title] == [
        "The relative residual."
    ]


@pytest.mark.slow
def test_more_ways_than_colours_and_exact_zeros_are_drawn(comparison):
    template = comparison.ways[-1]
    exact = (*template.history[:-1], TrainingPoint(epoch=4, seconds=9.0, error=0.0))
    ways = [dataclasses.replace(template, label=f"way {place}", history=exact) for place in range(len(WAY_COLOURS) + 2)]
    page = render_html(dataclasses.replace(comparison, ways=tuple(ways)))
    assert "way 8" in page


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_comparison_with_hardly_any_epochs_is_still_a_page(comparison, epochs):
    ways = [
        dataclasses.replace(way, records=way.records[:epochs], history=way.history[:epochs]) for way in comparison.ways
    ]
    assert "</html>" in render_html(dataclasses.replace(comparison, ways=tuple(ways)))


@pytest.mark.slow
def test_pairs_are_drawn_and_listed(comparison):
    test = PairedTest("val_<loss>", margin=0.1)
    runs = PairedRuns(test=test, reference=(1.0,) * 5, way=(1.01, 1.02, 0.99, 1.0, 9.0), null=1.01, repeated=1.005)
    assert pair_chart(comparison) is None
    assert "in pairs of runs" not in render_html(comparison)
    ways = (comparison.ways[0], dataclasses.replace(comparison.ways[1], pairs=runs), *comparison.ways[2:])
    tested = dataclasses.replace(comparison, ways=ways)
    page = render_html(tested)
    section = page.split("val_&lt;loss&gt; in pairs of runs</h2>")[1].split("</section>")[0]
    for words in (comparison.ways[1].label, "2.604", "+1.60", "The margin is 0.1.", "not deterministic by 0.00500"):
        assert words in section
    assert comparison.ways[0].label not in section.split("Not tested: ")[0]
    chart = pair_chart(tested)
    assert chart.figure.y_range.factors == [comparison.ways[1].label]
    [marks] = [plot for plot in chart.figure.renderers if "text" in getattr(plot, "data_source", EMPTY).data]
    assert list(marks.data_source.data["text"]) == ["-0.0100", "+0.00", "+0.0100", "+0.0200"]
    assert marks.data_source.data["x"] == pytest.approx([-0.01, 0, 0.01, 0.02])
    # The last pair is beyond the end of the axis, at four margins, and so is the mean.
    assert texts_in(chart, "text") == [["1 pair, mean 1.60"]]
    close = dataclasses.replace(runs, way=(1.01, 1.02, 0.99, 1.0, 1.01))
    ways = (comparison.ways[0], dataclasses.replace(comparison.ways[1], pairs=close), *comparison.ways[2:])
    axis = pair_chart(dataclasses.replace(comparison, ways=ways)).figure.x_range
    assert -0.06 < axis.start < -0.01, "no empty half"
    assert 0.1 < axis.end < 0.15
    null = dataclasses.replace(runs, way=(), null=float("nan"))
    ways = (comparison.ways[0], dataclasses.replace(comparison.ways[1], pairs=null), *comparison.ways[2:])
    untold = dataclasses.replace(comparison, ways=ways)
    assert pair_chart(untold) is None
    assert "cannot tell" in render_html(untold).split("in pairs of runs</h2>")[1].split("</section>")[0]


EMPTY = SimpleNamespace(data={})


def texts_in(chart, column):
    """The texts of each set of labels with such a column."""
    labels = [layout.source.data for layout in chart.figure.center if isinstance(layout, LabelSet)]
    return [list(data[column]) for data in labels if column in data]


def test_a_bar_that_the_axis_cuts_ends_in_a_triangle(comparison):
    """All pairs are on the axis, and the upper bound is beyond its end."""
    test = PairedTest("val_loss", margin=0.1, pairs=5)
    runs = PairedRuns(test=test, reference=(1.0,) * 5, way=(1.0, 1.0, 1.0, 1.39, 1.39), null=1.0, repeated=1.0)
    ways = (dataclasses.replace(comparison.ways[0], pairs=runs), *comparison.ways[1:])
    tested = dataclasses.replace(comparison, ways=ways)
    chart = pair_chart(tested).figure
    assert max(map(runs.scaled, runs.differences)) < chart.x_range.end < runs.scaled(runs.bounds[1])
    marks = [renderer.glyph for renderer in chart.renderers if getattr(renderer.glyph, "marker", "") == "triangle"]
    assert len(marks) == 1
    untested = [way.label for way in comparison.ways[1:] if not way.choices.reshuffles_all]
    page = render_html(tested)
    assert f"Not tested: {', '.join(f'“{label}”' for label in untested)}." in page


def test_equal_pairs_are_drawn_apart(comparison):
    test = PairedTest("loss", margin=0.1)
    runs = PairedRuns(test=test, reference=(1.0,) * 6, way=(1.02, 1.02, 1.02, 1.08, 9.0, 9.0), null=1.0, repeated=1.0)
    ways = (dataclasses.replace(comparison.ways[0], pairs=runs), *comparison.ways[1:])
    chart = pair_chart(dataclasses.replace(comparison, ways=ways))
    [marks] = [plot for plot in chart.figure.renderers if "text" in getattr(plot, "data_source", EMPTY).data]
    places = list(zip(marks.data_source.data["x"], marks.data_source.data["row"], strict=True))
    assert len(places) == len({*places}) == 4
    heights = [offset for _, (_, offset) in places]
    assert heights[0] < heights[1] < heights[2], "three equal pairs stand above each other"
    assert heights[3] == heights[0]
    assert texts_in(chart, "text") == [["2 pairs, mean 2.69"]]


@pytest.mark.parametrize("margin", [0.1, "10%"])
@pytest.mark.parametrize(
    "values",
    [
        {"way": (math.nan,) * 5},
        {"reference": (math.nan,) * 5, "null": math.nan, "repeated": math.nan},
        {"way": (1e30, 2e30, 1e30, 3e30, 1e30)},
        {"way": (1.01,)},
    ],
)
def test_ways_without_differences_or_bounds_have_a_report(comparison, values, margin):
    """It diverged, or ran once."""
    sound = {"reference": (1.0,) * 5, "way": (1.01,) * 5, "null": 1.01, "repeated": 1.0}
    runs = PairedRuns(test=PairedTest("loss", margin=margin), **(sound | values))
    ways = (dataclasses.replace(comparison.ways[0], pairs=runs), *comparison.ways[1:])
    chart = pair_chart(dataclasses.replace(comparison, ways=ways))
    assert -math.inf < chart.figure.x_range.start < 0 < chart.figure.x_range.end < math.inf
    bars = [
        plot.data_source.data for plot in chart.figure.renderers if "left" in getattr(plot, "data_source", EMPTY).data
    ]
    assert len(bars) == (values.get("way", (0,))[0] == 1e30)
    assert "in pairs of runs" in render_html(dataclasses.replace(comparison, ways=ways))


def test_many_equal_pairs_do_not_make_high_rows(comparison):
    test = PairedTest("loss", margin=0.1, pairs=200)
    runs = PairedRuns(test=test, reference=(1.0,) * 200, way=(1.02,) * 200, null=1.0, repeated=1.0)
    ways = (dataclasses.replace(comparison.ways[0], pairs=runs), *comparison.ways[1:])
    chart = pair_chart(dataclasses.replace(comparison, ways=ways))
    [marks] = [plot for plot in chart.figure.renderers if "text" in getattr(plot, "data_source", EMPTY).data]
    assert len({*marks.data_source.data["row"]}) == 12
    assert chart.figure.height < 200


def test_validation_metrics_stand_beside_the_errors(comparison):
    first, *others = comparison.ways
    points = [dataclasses.replace(point, validation={"<rmse>": 2.5 + point.epoch}) for point in first.history]
    comparison = dataclasses.replace(comparison, ways=(dataclasses.replace(first, history=tuple(points)), *others))
    section = render_html(comparison).split("<h3>&lt;rmse&gt;</h3>")[1].split("</details>")[0]
    assert all(f"<td>{2.5 + epoch:.3f}</td>" in section for epoch in range(5))
    [table] = [table for table, _ in comparison_tables(comparison) if str(table.title) == "<rmse> after each epoch"]
    assert [cell.plain for cell in table.columns[5].cells] == ["6.500", "-", "-", "-", "-", "-"]


def contrast(one, other):
    """The contrast ratio of two colours by the Web Content Accessibility Guidelines 2.1."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted([luminance(one), luminance(other)], reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_every_line_is_visible_on_a_dark_page_and_the_least_important_amount_is_the_darkest(comparison):
    card = re.search(r"dark\).*?--card: (#\w+)", render_html(comparison), re.S)[1]
    assert min(contrast(DARK_COLOURS[colour], card) for colour in WAY_COLOURS) > 4
    amounts = [contrast(DARK_COLOURS[colour], card) for colour in (LIGHT, MIDDLE, DARK)]
    assert amounts == sorted(amounts)
    both = [*DARK_COLOURS, *DARK_COLOURS.values()]
    assert len({*both}) == len(both), "theme.js finds the partner of a colour in both directions"


@pytest.mark.slow
def test_the_keys_of_lines_have_their_dashes_and_markers(comparison):
    page = render_html(comparison)
    lines = {chart.title: chart.figure for chart in charts(comparison)}["Error after each epoch"].renderers
    dashes = [line.glyph.line_dash for line in lines if "Line" in str(line.glyph)]
    markers = [marks.glyph.marker for marks in lines if "Scatter" in str(marks.glyph)]
    keys = re.findall(r"<svg.*?stroke-dasharray='(.*?)'/><(\w+)", page)[: len(comparison.ways)]
    for (array, shape), dash, marker in zip(keys, dashes, markers, strict=True):
        assert [int(length) for length in re.findall(r"\d+", array)] in (dash, dash[:1])
        assert (shape == "circle") == (marker == "circle")
    assert len({*re.findall(r"(?:points='.*?'|<circle)", page)}) == len({*markers})


def test_equal_errors_are_said_to_be_equal(comparison):
    captions = {chart.title: chart.caption for chart in charts(comparison)}
    caption = captions["Error after each epoch"]
    assert "equal errors, and one line: “local, shuffled once”, “global + storage”" in caption
    alone = dataclasses.replace(comparison, ways=comparison.ways[:2])
    assert "equal" not in next(chart.caption for chart in charts(alone) if chart.title == "Error after each epoch")


def test_the_time_of_making_a_copy_is_in_the_picture(comparison):
    assert "copy" not in charts(comparison)[0].caption
    ways = (*comparison.ways[:-1], dataclasses.replace(comparison.ways[-1], copy_seconds=1.5))
    bars, *_, by_time = charts(dataclasses.replace(comparison, ways=ways))
    times = bars.figure.center[-1].source.data
    label = ways[-1].label
    assert "+ copy, 1.50 s" in times["text"][times["way"].index(label)]
    assert "once before training" in bars.caption
    line = next(item for item in by_time.figure.renderers if item.name == f"line: {label}").data_source.data
    assert line["x"] == pytest.approx([point.seconds + 1.5 for point in ways[-1].history])


NOTE = "The time of a way that exchanges for every K-th epoch only is a mean of epochs with and without an exchange."


@pytest.mark.slow
def test_times_that_are_means_of_unequal_epochs_are_said_to_be(comparison):
    assert NOTE not in charts(comparison)[0].caption
    assert NOTE not in render_html(comparison)
    sparse = dataclasses.replace(
        comparison.ways[-1], choices=dataclasses.replace(comparison.ways[-1].choices, every=2), label="sparse"
    )
    comparison = dataclasses.replace(comparison, ways=(*comparison.ways, sparse))
    assert NOTE in charts(comparison)[0].caption
    assert render_html(comparison).count(NOTE) == 2


def test_bars_are_compared_with_those_of_local_ways_if_there_are_any(comparison):
    words = "The difference from the bars of local ways is the cost of the exchange."
    assert charts(comparison)[0].caption.endswith(words)
    alone = dataclasses.replace(comparison, ways=comparison.ways[2:])
    assert "local" not in charts(alone)[0].caption


def test_a_mark_of_a_letter_has_no_swatch(comparison):
    assert "<span>◀ to reshuffle everything</span>" in render_html(comparison)


def test_texts_beside_bars_end_before_the_axis(comparison):
    chart = charts(comparison)[0].figure
    [labels] = [item for item in chart.center if isinstance(item, LabelSet) and "seconds" in item.source.data]
    for seconds, text in zip(labels.source.data["seconds"], labels.source.data["text"], strict=True):
        # On a phone of 390 pixels, the axis has 300; letters of 12 pixels take 6 each.
        assert seconds / chart.x_range.end + 6 * len(text) / 300 < 1.01


@pytest.mark.parametrize(
    ("predicted", "wire", "corrected"),
    [
        (0.1, 0.01, lambda measured: measured - 50),
        (0.15, 0.15, lambda measured: measured / 3),
        (0.4, 0.01, lambda measured: measured / 8),
    ],
)
def test_other_links_are_corrected_by_what_was_measured(comparison, predicted, wire, corrected):
    """What processors take longer than predicted is not multiplied by what slower links take longer."""
    way = dataclasses.replace(
        comparison.ways[-1],
        predicted_seconds=predicted,
        predicted_wire_seconds=wire,
        on_other_links={"1 Gbit/s": 0.05},
    )
    page = render_html(dataclasses.replace(comparison, ways=(way,))).replace(NO_BREAK, " ")
    measured = next(cell for cell in re.findall(r"<td>(\d+) ms</td>", page.split("last error")[1])[1:])
    section = page.split("An exchange on other links")[1].split("</section>")[0]
    [shown] = re.findall(r"<td>([\d.]+) ms</td>", section)
    assert float(shown) == pytest.approx(corrected(int(measured)), abs=1)
