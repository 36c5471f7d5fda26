"""The report as a page, as text for a terminal and as files: what the templates need beside the facts of a story."""

from __future__ import annotations

import functools
import importlib
import io
import json
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
from markupsafe import Markup, escape

from dshuffle.noninferiority import PairedOutcome
from dshuffle.report.facts import Series, facts_of, series_of
from dshuffle.report.summary import (
    Comparison,
    Figures,
    Spread,
    WayResult,
    corrected,
    figures,
    has_errors,
    limited_by_processors,
    make_folder,
    to_dict,
    write_records,
)
from dshuffle.units import (
    ERROR_DIGITS,
    METRIC_DIGITS,
    NO_BREAK,
    UNKNOWN,
    human_bytes,
    human_count,
    human_numbers,
    human_ratio,
    human_seconds,
    kept_together,
)

Cell = Callable[[WayResult, Figures], str]

MARGINS_SHOWN = 4.0
"""The axis of pairs ends at this many margins, or beyond the pairs of the way that the answer is about."""

LEVELS = 5
"""Heights at which the marks of pairs are drawn, so that equal ones do not hide each other."""


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _range(spread: Spread | None) -> str:
    return UNKNOWN if spread is None else f"{human_seconds(spread.least)} to {human_seconds(spread.greatest)}"


def _idle(way: WayResult, of: Figures) -> str:
    mark = " !" if limited_by_processors(way, of) else ""
    return UNKNOWN if of.cpu_idle is None else f"{100 * of.cpu_idle:.0f} %{mark}"


COLUMNS: dict[str, dict[str, Cell]] = {
    "Times": {
        "epoch": lambda _, of: human_seconds(of.epoch_seconds),
        "exchange": lambda _, of: human_seconds(_median(of.shuffle_seconds)),
        "range": lambda _, of: _range(of.shuffle_seconds),
        "predicted": lambda way, _: human_seconds(way.predicted_seconds),
        "training": lambda _, of: human_seconds(of.training_seconds),
        "waited": lambda _, of: human_seconds(of.waited_seconds),
        "idle CPU": _idle,
    },
    "Traffic": {
        "samples received": lambda _, of: human_count(of.needed),
        "packets": lambda _, of: human_count(0 if of.wire_bytes == 0 else of.packets),
        "bytes sent": lambda _, of: human_bytes(of.wire_bytes),
        "by the server": lambda _, of: human_bytes(of.server_sent_bytes),
        "bytes read": lambda _, of: human_bytes(of.store_bytes),
        "read amplification": lambda _, of: (
            UNKNOWN if of.read_amplification is None else human_ratio(of.read_amplification)
        ),
        "requests": lambda _, of: human_count(of.store_requests),
        "requests/s": lambda _, of: human_count(of.requests_per_second),
    },
}
"""The table of figures, in two parts. ``templates/words.txt`` says what each column means."""

FIRST = ("epoch", "exchange", "waited")
"""Columns of the first part that are read first."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of all ways, by label."""

    title: str
    headings: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]


def tables_of(comparison: Comparison) -> list[Table]:
    """The table of figures: what is read first, and then part by part."""
    ways = [(way, figures(way)) for way in comparison.ways]
    series = series_of(comparison)
    first = {name: COLUMNS["Times"][name] for name in FIRST}
    parts = {"": first, **COLUMNS}
    tables = [
        Table(title, tuple(columns), {way.label: tuple(cell(way, of) for cell in columns.values()) for way, of in ways})
        for title, columns in parts.items()
    ]
    extra = {way.label: tuple(_answer(way, one) for one in series) for way in comparison.ways}
    headings = tuple(
        f"{one.runs.test.metric}" + ("" if one.averages == "unknown" else f", {one.averages} averaged")
        for one in series
    )
    if not series and has_errors(comparison):
        headings = ("last error",)
        last = [way.history[-1].error if way.history else None for way in comparison.ways]
        extra = {
            way.label: (text,) for way, text in zip(comparison.ways, human_numbers(last, ERROR_DIGITS), strict=True)
        }
    tables[0] = Table(
        "", (*headings, *FIRST), {label: (*extra[label], *cells) for label, cells in tables[0].rows.items()}
    )
    tables += [_pairs(one, comparison) for one in series]
    if links := next((tuple(way.on_other_links) for way in comparison.ways if way.on_other_links), ()):
        tables.append(
            Table(
                "An exchange on other links",
                links,
                {
                    way.label: tuple(human_seconds(corrected(way, way.on_other_links[link])) for link in links)
                    for way in comparison.ways
                    if way.on_other_links and way.choices.assignment.moves
                },
            )
        )
    return [*tables, *_epochs(comparison)]


def _answer(way: WayResult, series: Series) -> str:
    """How much worse a way is than reshuffling, or that it is not."""
    if way.choices.reshuffles_all:
        return "reference"
    runs = way.pairs.get(series.averages)
    if runs is None:
        return "not tested"
    if runs.outcome is PairedOutcome.WORSE:
        return "diverges" if math.isnan(runs.mean) else runs.shown_mean
    return "not clear yet" if runs.outcome is None else runs.outcome.value


def _pairs(series: Series, comparison: Comparison) -> Table:
    tested = {way.label: way.pairs[series.averages] for way in comparison.ways if series.averages in way.pairs}
    finite = [[value for value in runs.way if math.isfinite(value)] for runs in tested.values()]
    means = human_numbers([sum(values) / len(values) if values else None for values in finite], METRIC_DIGITS)
    rows = {
        label: (
            mean,
            *((runs.shown_mean, runs.shown_bounds) if runs.n_pairs else (UNKNOWN, UNKNOWN)),
            str(runs.n_pairs),
            "" if runs.outcome is None else runs.outcome.value,
        )
        for (label, runs), mean in zip(tested.items(), means, strict=True)
    }
    words = "" if series.averages == "unknown" else f", {series.averages} averaged"
    return Table(
        f"{series.runs.test.metric} in pairs of runs{words}", ("mean", "difference", "bounds", "pairs", "answer"), rows
    )


def _epochs(comparison: Comparison) -> list[Table]:
    """The error and each metric after each epoch."""
    points = [point for way in comparison.ways for point in way.history]
    epochs = sorted({point.epoch for point in points})
    metrics = dict.fromkeys(name for point in points for name in point.validation)
    names = [*(["error"] if has_errors(comparison) else []), *metrics]
    tables = []
    for name in names:
        values = {
            way.label: {point.epoch: {"error": point.error, **point.validation}.get(name) for point in way.history}
            for way in comparison.ways
        }
        digits = ERROR_DIGITS if name == "error" else METRIC_DIGITS
        texts = iter(human_numbers([found.get(epoch) for found in values.values() for epoch in epochs], digits))
        rows = {label: tuple(next(texts) for _ in epochs) for label in values}
        tables.append(Table(f"{name} after each epoch", tuple(map(str, epochs)), rows))
    return tables


def _time_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Widths of the parts of an epoch in percent of the longest one, the fastest way first."""
    bars: list[dict[str, Any]] = []
    for place, way in enumerate(comparison.ways):
        of = figures(way)
        whole, training, waited = (value or 0.0 for value in (of.epoch_seconds, of.training_seconds, of.waited_seconds))
        parts = {"training": training, "waiting": waited, "other": max(0.0, whole - training - waited)}
        bars.append({"place": place, "way": way, "whole": whole, "parts": parts, "end": max(whole, training + waited)})
    longest = max((bar["end"] for bar in bars), default=0.0) or 1.0
    for bar in bars:
        bar["widths"] = {name: 100 * seconds / longest for name, seconds in bar["parts"].items()}
    return sorted(bars, key=lambda bar: bar["whole"])


def _error_lines(comparison: Comparison) -> dict[str, Any]:
    """Points of the errors against time in percent of the axes, with a logarithmic axis of errors; empty without."""
    found = [
        [((way.copy_seconds or 0.0) + point.seconds, point.error) for point in way.history if point.error > 0]
        for way in comparison.ways
    ]
    values = [(x, math.log10(error)) for points in found for x, error in points if math.isfinite(error)]
    if not values:
        return {}
    end = max(x for x, _ in values) or 1.0
    low, high = min(y for _, y in values), max(y for _, y in values)
    room = 0.05 * (high - low) or 0.1
    low, high = low - room, high + room

    def height(y: float) -> float:
        return 100 * (high - y) / (high - low)

    decades = range(math.ceil(low), math.floor(high) + 1)
    ticks = [float(decade) for decade in decades] if len(decades) > 1 else [low + room, (low + high) / 2, high - room]
    texts = human_numbers([10**tick for tick in ticks], 2)
    lines = [
        [(100 * x / end, height(math.log10(error))) for x, error in points if math.isfinite(error)] for points in found
    ]
    every = max(1, len(ticks) // 6 + 1)
    return {
        "lines": lines,
        "ticks": [(height(tick), text) for tick, text in zip(ticks, texts, strict=True)][::every],
        "times": [(share, human_seconds(end * share / 100)) for share in (0, 25, 50, 75, 100)],
    }


def _pair_marks(series: Series, comparison: Comparison) -> dict[str, Any]:
    """Pairs, bounds and the margin in percent of an axis, which does not go far beyond the closest way."""
    tested = [
        (place, way.label, way.pairs[series.averages])
        for place, way in enumerate(comparison.ways)
        if series.averages in way.pairs
    ]
    shown = [value for _, _, runs in tested for value in (*runs.differences, *runs.bounds) if math.isfinite(value)]
    limit = series.runs.limit
    of_subject = (series.subject_runs or series.runs).differences
    end = max(MARGINS_SHOWN * limit, 1.5 * float(np.abs(of_subject).max(initial=0.0))) or 1.0
    least, most = max(min([0.0, *shown]) - limit / 4, -end), min(max([limit, *shown]) + limit / 4, end)
    most = max(most, least + 1e-9)

    def place_of(value: float) -> float:
        return float(100 * (min(max(value, least), most) - least) / (most - least))

    rows = []
    for place, label, runs in tested:
        low, high = (0.0 if math.isnan(bound) else place_of(bound) for bound in runs.bounds)
        marks = [
            (place_of(value), index % LEVELS, runs.shown(value), not least <= value <= most)
            for index, value in enumerate(sorted(runs.differences.tolist()))
        ]
        beyond = sum(mark[3] for mark in marks)
        rows.append(
            {"place": place, "label": label, "runs": runs, "bar": (low, high - low), "marks": marks, "n": beyond}
        )
    return {"zero": place_of(0.0), "margin": place_of(limit), "rows": rows, "series": series}


def _unbroken(text: object) -> Markup:
    """Text in which no line ends within a number such as 1.2e-07, or between a number and its unit."""
    unbroken = kept_together(str(text)).replace(f"{NO_BREAK}-{NO_BREAK}", f"{NO_BREAK}\u2212{NO_BREAK}")
    return Markup(re.sub(r"(?<=\de)-(?=\d)", "\u2011", str(escape(unbroken))))


@functools.cache
def templates(html: bool) -> jinja2.Environment:
    """The templates of pages, or of texts for a terminal."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "seconds": human_seconds,
        "bytes": human_bytes,
        "count": human_count,
        "ratio": human_ratio,
        "numbers": human_numbers,
        "unbroken": _unbroken,
        "listed": listed,
        "quoted": lambda labels: [f"“{label}”" for label in labels],
        "fact": lambda value: f"{value:.6g}" if isinstance(value, float) else str(value),
    }
    return environment


def listed(parts: Iterable[str]) -> str:
    """Names as a list in a sentence."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def story(comparison: Comparison) -> list[str]:
    """The answer in at most 15 words, and then what explains it, in sentences."""
    text = templates(False).get_template("story.txt").render(comparison=comparison, **facts_of(comparison))
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def names_of(comparison: Comparison) -> dict[str, str]:
    """What the name of each way means."""
    words: Any = templates(False).get_template("words.txt").module
    return {way.label: " ".join(str(words.explained(way)).split()) for way in comparison.ways}


def meanings(headings: Iterable[str]) -> str:
    """What the columns of a table mean."""
    words: Any = templates(False).get_template("words.txt").module
    texts = [f"{heading}: {words.MEANINGS[heading]}." for heading in headings if heading in words.MEANINGS]
    return " ".join(texts)


def render_html(comparison: Comparison) -> str:
    """Render the report as one HTML document that loads nothing from elsewhere."""
    answer, *why = story(comparison)
    first, *others = tables_of(comparison)
    program, *arguments = comparison.command.split()
    return (
        templates(True)
        .get_template("report.html")
        .render(
            comparison=comparison,
            program=" ".join([program, *arguments[:1]]) if program == "dshuffle" else "dshuffle",
            settings={"seed": comparison.seed, **comparison.settings},
            answer=answer,
            why=why,
            first=first,
            tables=others,
            names=names_of(comparison),
            places={way.label: place % 10 for place, way in enumerate(comparison.ways)},
            meanings=meanings,
            records=[record for way in comparison.ways for record in way.records],
            loads=[record for way in comparison.ways for record in way.records if record.loaded],
            bars=_time_bars(comparison),
            errors=_error_lines(comparison),
            pairs=[_pair_marks(one, comparison) for one in series_of(comparison) if one.runs.n_pairs],
        )
    )


def render_text(comparison: Comparison, width: int = 80) -> str:
    """Render the report for a terminal: the answer, what explains it, the first figures, and the pairs."""
    answer, *why = story(comparison)
    first, *others = tables_of(comparison)
    shown = [first, *(one for one in others if "in pairs of runs" in one.title)]
    return (
        templates(False)
        .get_template("terminal.txt")
        .render(
            answer=answer,
            why=why,
            tables=[(one.title, _as_text(one, width), meanings(one.headings)) for one in shown],
            names=names_of(comparison),
            comparison=comparison,
            wrapped=functools.partial(_wrapped, width=width),
        )
    )


def _wrapped(text: str, width: int, indent: str = "") -> str:
    """Lines of a terminal; none ends between a number and its unit."""
    filled = textwrap.fill(kept_together(text), width, break_on_hyphens=False, subsequent_indent=indent)
    return filled.replace(NO_BREAK, " ")


def _as_text(one: Table, width: int) -> str:
    table = rich.table.Table("way", box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in one.headings:
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for label, cells in one.rows.items():
        table.add_row(rich.text.Text(label), *map(rich.text.Text, cells))  # a label is data, never markup
    console = rich.console.Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def write_report(comparison: Comparison, directory: str | Path) -> Path:
    """Write ``report.html``, ``records.jsonl`` and ``summary.json``, and replace existing files.

    Existing files are replaced only when all new ones are complete.
    """
    folder = Path(directory)
    make_folder(folder)
    summary = json.dumps(to_dict(comparison, story(comparison)), indent=2)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as new:
        (Path(new) / "report.html").write_text(render_html(comparison), encoding="utf-8")
        write_records(comparison, Path(new) / "records.jsonl")
        (Path(new) / "summary.json").write_text(summary + "\n", encoding="utf-8")
        for path in Path(new).iterdir():
            path.replace(folder / path.name)
    return folder / "report.html"


def chart_page(title: str, text: str, sections: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a page of charts."""
    embed, resources = (importlib.import_module(f"bokeh.{name}") for name in ("embed", "resources"))
    named = [(heading, list(plots)) for heading, plots in sections]
    plots = [plot for _, some in named for plot in some]
    for plot in plots:
        plot.sizing_mode = "stretch_width"
    script, divisions = embed.components(plots)
    left = iter(divisions)
    return (
        templates(True)
        .get_template("charts.html")
        .render(
            title=title,
            text=text,
            sections=[(heading, [Markup(next(left)) for _ in some]) for heading, some in named],
            script=Markup(script),
            library=Markup(resources.Resources(mode="inline", components=["bokeh"]).render()),
        )
    )
