from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from dshuffle.report import TrainingPoint, render_html, verdict_sentences
from dshuffle.report.charts import WAY_COLOURS, charts


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
        assert sentence.replace("e-", "e\u2011") in text
    for way in comparison.ways:
        assert way.label in text
    for fact in (comparison.command, "2026.8.0", "/data/keyed.zarr", "Linux 6.1", "seed 7", "0.02", "3.86"):
        assert fact in text
    assert "prefers-color-scheme: dark" in render_html(comparison)


def test_exchanges_on_other_links_are_shown_where_they_are_predicted(comparison):
    assert "other links" not in render_html(comparison)
    ways = [dataclasses.replace(way, on_other_links={"1 Gbit/s": 1.23, "<10>": 0.5}) for way in comparison.ways[1:]]
    page = render_html(dataclasses.replace(comparison, ways=(comparison.ways[0], *ways)))
    section = page.split("An exchange on other links")[1].split("</section>")[0]
    assert section.count("1.23 s") == len(ways)
    assert "&lt;10&gt;" in section
    assert comparison.ways[0].label not in section


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
    for title in ("Time per epoch", "Where an exchange spends its time"):
        assert set(drawn[title].figure.y_range.factors) == labels
    assert {label for label, _ in drawn["Bytes per epoch"].figure.y_range.factors} == labels
    for title in ("Error after each epoch", "Error against time"):
        assert {meaning for _, meaning in drawn[title].key} == labels
        lines = [item.data_source.data for item in drawn[title].figure.renderers if "Line" in str(item.glyph)]
        assert [list(line["error"]) for line in lines] == [
            [point.error for point in way.history] for way in comparison.ways
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
