"""The report as a page, as text for a terminal and as files: the facts, tables and charts that the templates show."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
from markupsafe import Markup, escape

from dshuffle.noninferiority import ERROR_RATE, PairedOutcome, holm
from dshuffle.records import slow_rank_of
from dshuffle.report.summary import (
    CPU_BOUND,
    Comparison,
    Spread,
    WayResult,
    has_errors,
    make_folder,
    records_of,
    to_dict,
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

CLOSE = 1.5
"""If the medians of two strategies differ by more than this factor, one is called faster even if their ranges overlap.
A single slow epoch can make ranges overlap."""

ALIKE = 1.05
"""If the medians of two strategies differ by less than this factor, none is called faster, even if ranges are apart."""

SERIES = ("gradients", "models", "unknown")
"""What a training averages, in the order of the report."""

MARGINS_SHOWN = 4.0
"""The axis of pairs ends at this many margins, or beyond the pairs of the strategy that the answer is about."""

LEVELS = 5
"""Heights at which the marks of pairs are drawn, so that equal ones do not hide each other."""


def _spread(way: WayResult) -> Spread:
    assert way.figures.epoch_spread is not None
    return way.figures.epoch_spread


def _median(way: WayResult) -> float:
    return _spread(way).median


def _ranking(ways: Iterable[WayResult]) -> SimpleNamespace | None:
    """The strategies that reshuffle everything: the fastest, those with times like its times, and the slower ones."""
    ranked = sorted((way for way in ways if way.choices.reshuffles_all and way.figures.epoch_spread), key=_median)
    if not ranked:
        return None
    fastest = ranked[0]

    def overlaps(other: WayResult) -> bool:
        return _spread(other).least <= _spread(fastest).greatest

    ratios = [_median(way) / _median(fastest) for way in ranked]
    is_alike = [ratio < ALIKE or (overlaps(way) and ratio <= CLOSE) for way, ratio in zip(ranked, ratios, strict=True)]
    alike = [way for way, same in zip(ranked, is_alike, strict=True) if same][1:]
    slower = [place for place, same in enumerate(is_alike) if not same]
    # What the fastest is compared with: a strategy that reads again, or else the next slower one.
    other = next((place for place in slower if ranked[place].choices.reads_store), slower[0] if slower else 0)
    return SimpleNamespace(
        ways=[fastest, *alike, *(ranked[place] for place in slower)],
        fastest=fastest,
        alike=alike,
        overlaps=bool(alike) and overlaps(alike[0]),
        slower=slower,
        other=ranked[other],
        times_longer=ratios[other],
    )


def _is_shuffled_once(way: WayResult) -> bool:
    return not way.choices.assignment.moves and str(way.choices.sharding) == "random"


def _series(averages: str, ways: Iterable[WayResult]) -> SimpleNamespace:
    """The pairs of runs of one training, and whether to reshuffle: "no", "yes" or "cannot tell"."""
    tested = {way.label: way for way in ways if averages in way.pairs}
    labels: dict[int, list[str]] = {}
    for label, way in tested.items():
        labels.setdefault(id(way.pairs[averages]), []).append(label)
    once = next((label for label, way in tested.items() if _is_shuffled_once(way)), None)
    # Strategies that learn the same, and their pairs: one shuffle before training first.
    ordered = sorted(labels.values(), key=lambda group: once not in group)
    groups = [(group, tested[group[0]].pairs[averages]) for group in ordered]
    by_first = holm({group[0]: runs for group, runs in groups})
    p_values = {label: by_first[group[0]] for group, _ in groups for label in group}
    # The answer is about one shuffle before training, or else about the first strategy that is not worse.
    subject = once or next((label for label, p_value in p_values.items() if p_value <= ERROR_RATE), None)
    of_subject = next((runs for group, runs in groups if subject in group), None)
    is_not_worse = of_subject is not None and of_subject.outcome is PairedOutcome.NOT_WORSE
    by_chance = is_not_worse and p_values[subject or ""] > ERROR_RATE
    judged = [runs for _, runs in groups] if of_subject is None else [of_subject]
    answer = "no" if is_not_worse and not by_chance else "cannot tell"
    return SimpleNamespace(
        averages=averages,
        groups=groups,
        once=once,
        runs=max((runs for _, runs in groups), key=lambda runs: runs.n_pairs),
        others=[
            {"label": label, "answer": runs.outcome.value if runs.outcome else "not clear yet"}
            for group, runs in groups[1:]
            for label in group
        ],
        subject=subject,
        subject_runs=of_subject,
        by_chance=by_chance,
        answer="yes" if all(runs.outcome is PairedOutcome.WORSE for runs in judged) else answer,
    )


def series_of(comparison: Comparison) -> list[SimpleNamespace]:
    """The trainings that strategies were tested with."""
    return [_series(name, comparison.ways) for name in SERIES if any(name in way.pairs for way in comparison.ways)]


def _hardly_begun(comparison: Comparison) -> dict[str, Any]:
    """That training was far from its end, so that more epochs may give another answer to the pairs.

    The last epoch improved the model by more than the margin, and by at least half of the mean improvement of an epoch.
    """
    name = comparison.averages
    pairs = next((way.pairs[name] for way in comparison.ways if name in way.pairs), None)
    histories = [way.history for way in comparison.ways if way.choices.reshuffles_all and len(way.history) > 2]
    if pairs is None or pairs.reason or not histories:
        return {}
    history, metric = histories[0], pairs.test.metric
    if all(metric in point.validation for point in history):
        sign = 1.0 if pairs.test.higher_is_better else -1.0
        values = [sign * point.validation[metric] for point in history]
    else:
        metric = "the error"
        start = [] if comparison.error_at_start is None else [comparison.error_at_start]
        values = [-error for error in (*start, *(point.error for point in history))]
    last, total = values[-1] - values[-2], values[-1] - values[0]
    least = pairs.relative_limit * abs(values[-1])
    if not (last > least and last >= total / (len(values) - 1) / 2) or not values[0]:
        return {}
    return {"metric": metric, "gains": [100 * gain / abs(values[0]) for gain in (total, last)]}


def facts_of(comparison: Comparison) -> dict[str, Any]:
    """What the sentences of ``templates/story.txt`` are made of."""
    ways = comparison.ways
    timed = [way for way in ways if way.figures.epoch_seconds is not None]
    chunks = [
        way for way in ways if way.choices.assignment.in_chunks and way.figures.epoch_spread and way.choices.every == 1
    ]
    slow = {way.label: words for way in ways if (words := slow_rank_of(way.records))}
    ranking = _ranking(ways)
    return {
        "series": series_of(comparison),
        "ranking": ranking,
        "busy": [way.label for way in ranking.ways if way.limited_by_processors] if ranking else [],
        "redraws": any(way.choices.assignment.redraws_all and not way.choices.reshuffles_all for way in ways),
        "alone": min((way.figures.epoch_seconds for way in timed if not way.choices.assignment.moves), default=None),  # type: ignore[type-var]
        "chunks": min(chunks, key=_median, default=None),
        "sparse": [way for way in timed if way.choices.every > 1],
        "has_errors": has_errors(comparison),
        "begun": _hardly_begun(comparison),
        "slow_ranks": " ".join(f"With “{label}”, {words}." for label, words in slow.items()),
        "untested": [way for way in ways if not way.pairs and not way.choices.reshuffles_all],
        "cpu_bound": CPU_BOUND,
    }


def _shown(show: Callable[[float], str], name: str) -> Callable[[WayResult], str]:
    """A column: how a figure of a strategy is shown; of a spread, its median."""

    def cell(way: WayResult) -> str:
        value = getattr(way.figures, name)
        value = value.median if isinstance(value, Spread) else value
        return UNKNOWN if value is None else show(value)

    return cell


def _range(way: WayResult) -> str:
    spread = way.figures.shuffle_seconds
    return UNKNOWN if spread is None else f"{human_seconds(spread.least)} to {human_seconds(spread.greatest)}"


_idle = _shown(lambda share: f"{100 * share:.0f} %", "cpu_idle")
COLUMNS: dict[str, dict[str, Callable[[WayResult], str]]] = {
    "Times": {
        "epoch": _shown(human_seconds, "epoch_seconds"),
        "exchange": _shown(human_seconds, "shuffle_seconds"),
        "range": _range,
        "predicted": lambda way: human_seconds(way.predicted_seconds),
        "training": _shown(human_seconds, "training_seconds"),
        "waited": _shown(human_seconds, "waited_seconds"),
        "idle CPU": lambda way: _idle(way) + (" !" if way.limited_by_processors else ""),
    },
    "Traffic": {
        "samples received": _shown(human_count, "needed"),
        "packets": lambda way: "0" if way.figures.wire_bytes == 0 else _shown(human_count, "packets")(way),
        "bytes sent": _shown(human_bytes, "wire_bytes"),
        "by the server": _shown(human_bytes, "server_sent_bytes"),
        "bytes read": _shown(human_bytes, "store_bytes"),
        "read amplification": _shown(human_ratio, "read_amplification"),
        "requests": _shown(human_count, "store_requests"),
        "requests/s": _shown(human_count, "requests_per_second"),
    },
}
"""The table of figures, in two parts. ``templates/words.txt`` says what each column means."""

FIRST = ("epoch", "exchange", "waited")
"""Columns of the first part that are read first."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of all strategies, by label."""

    title: str
    headings: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]


def tables_of(comparison: Comparison) -> list[Table]:
    """The table of figures: what is read first, and then part by part."""
    ways, series = comparison.ways, series_of(comparison)
    first: dict[str, list[str]] = {
        f"{pairs.runs.test.metric}{_averaged(pairs)}": [_answer(way, pairs) for way in ways] for pairs in series
    }
    if not series and has_errors(comparison):
        last = [way.history[-1].error if way.history else None for way in ways]
        first["last error"] = human_numbers(last, ERROR_DIGITS)
    parts = {title: {name: list(map(cell, ways)) for name, cell in cells.items()} for title, cells in COLUMNS.items()}
    first |= {name: parts["Times"][name] for name in FIRST}
    labels = [way.label for way in ways]
    tables = [
        Table(title, tuple(columns), dict(zip(labels, zip(*columns.values(), strict=True), strict=True)))
        for title, columns in ({"": first} | parts).items()
    ]
    tables += [_pairs(pairs, comparison) for pairs in series]
    return [*tables, *_epochs(comparison)]


def _averaged(series: SimpleNamespace) -> str:
    return "" if series.averages == "unknown" else f", {series.averages} averaged"


def _answer(way: WayResult, series: SimpleNamespace) -> str:
    """How much worse a strategy is than reshuffling, or that it is not."""
    if way.choices.reshuffles_all:
        return "reference"
    runs = way.pairs.get(series.averages)
    if runs is None:
        return "not tested"
    if runs.outcome is PairedOutcome.WORSE:
        return "diverges" if math.isnan(runs.mean) else runs.shown_mean
    return "not clear yet" if runs.outcome is None else runs.outcome.value


def _pairs(series: SimpleNamespace, comparison: Comparison) -> Table:
    tested = {way.label: way.pairs[series.averages] for way in comparison.ways if series.averages in way.pairs}
    finite = [[value for value in runs.way if math.isfinite(value)] for runs in tested.values()]
    means = human_numbers([sum(values) / len(values) if values else None for values in finite], METRIC_DIGITS)
    rows = {
        label: (
            mean,
            runs.shown_mean if runs.n_pairs else UNKNOWN,
            runs.shown_bounds if runs.n_pairs else UNKNOWN,
            str(runs.n_pairs),
            "" if runs.outcome is None else runs.outcome.value,
        )
        for (label, runs), mean in zip(tested.items(), means, strict=True)
    }
    title = f"Pairs of runs, {series.runs.test.metric}{_averaged(series)}"
    return Table(title, ("mean", "difference", "bounds", "pairs", "answer"), rows)


def _epochs(comparison: Comparison) -> list[Table]:
    """The error and each metric after each epoch."""
    values = {
        way.label: {point.epoch: {"error": point.error, **point.validation} for point in way.history}
        for way in comparison.ways
    }
    points = [(epoch, point) for of_way in values.values() for epoch, point in of_way.items()]
    epochs = sorted({epoch for epoch, _ in points})
    tables = []
    for name in dict.fromkeys(name for _, point in points for name in point):
        if name == "error" and not has_errors(comparison):
            continue
        numbers = [of_way.get(epoch, {}).get(name) for of_way in values.values() for epoch in epochs]
        texts = iter(human_numbers(numbers, ERROR_DIGITS if name == "error" else METRIC_DIGITS))
        rows = {label: tuple(next(texts) for _ in epochs) for label in values}
        tables.append(Table(f"After each epoch, {name}", tuple(map(str, epochs)), rows))
    return tables


def _time_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Widths of the parts of an epoch in percent of the longest one, the fastest strategy first."""
    bars: list[dict[str, Any]] = []
    for place, way in enumerate(comparison.ways):
        of = way.figures
        whole, training, waiting = (
            value or 0.0 for value in (of.epoch_seconds, of.training_seconds, of.waited_seconds)
        )
        parts = {"training": training, "waiting": waiting, "other": max(0.0, whole - training - waiting)}
        bars.append({"place": place, "way": way, "whole": whole, "parts": parts})
    longest = max((max(bar["whole"], sum(bar["parts"].values())) for bar in bars), default=0.0) or 1.0
    for bar in bars:
        bar["widths"] = {name: 100 * seconds / longest for name, seconds in bar["parts"].items()}
    return sorted(bars, key=lambda bar: bar["whole"])


def _error_lines(comparison: Comparison) -> dict[str, Any]:
    """Points of the errors against time in percent of the axes, with a logarithmic axis of errors; empty without."""
    lines = [
        [
            ((way.copy_seconds or 0.0) + point.seconds, math.log10(point.error))
            for point in way.history
            if 0 < point.error < math.inf
        ]
        for way in comparison.ways
    ]
    times, errors = zip(*itertools.chain(*lines), strict=True) if any(lines) else ((), ())
    if not errors:
        return {}
    end, low, high = max(times) or 1.0, min(errors), max(errors)
    room = 0.05 * (high - low) or 0.1
    low, high = low - room, high + room

    def height(y: float) -> float:
        return float(100 * (high - y) / (high - low))

    ticks = [float(decade) for decade in range(math.ceil(low), math.floor(high) + 1)]
    if len(ticks) < 2:
        ticks = [low + room, (low + high) / 2, high - room]
    texts = human_numbers([10**tick for tick in ticks], 2)
    return {
        "lines": [[(100 * x / end, height(y)) for x, y in line] for line in lines],
        "ticks": [*zip(map(height, ticks), texts, strict=True)][:: len(ticks) // 6 + 1],
        "times": [(share, human_seconds(end * share / 100)) for share in (0, 25, 50, 75, 100)],
    }


def _pair_marks(series: SimpleNamespace, comparison: Comparison) -> dict[str, Any]:
    """Pairs, bounds and the margin in percent of an axis, which does not go far beyond the closest way."""
    tested = [(place, way.label, way.pairs.get(series.averages)) for place, way in enumerate(comparison.ways)]
    known = [(place, label, runs) for place, label, runs in tested if runs is not None]
    shown = [value for _, _, runs in known for value in (*runs.differences, *runs.bounds) if math.isfinite(value)]
    limit, of_subject = series.runs.limit, (series.subject_runs or series.runs).differences
    end = max(MARGINS_SHOWN * limit, 1.5 * float(np.abs(of_subject).max(initial=0.0))) or 1.0
    least, most = max(min([0.0, *shown]) - limit / 4, -end), min(max([limit, *shown]) + limit / 4, end)
    most = max(most, least + 1e-9)

    def place_of(value: float) -> float:
        return float(100 * (min(max(value, least), most) - least) / (most - least))

    rows = []
    for place, label, runs in known:
        low, high = (0.0 if math.isnan(bound) else place_of(bound) for bound in runs.bounds)
        marks = [
            (place_of(value), index % LEVELS, runs.shown(value), not least <= value <= most)
            for index, value in enumerate(sorted(runs.differences.tolist()))
        ]
        row = {"place": place, "label": label, "runs": runs, "bar": (low, high - low), "marks": marks}
        rows.append({**row, "n": sum(mark[3] for mark in marks)})
    unit = limit or end
    step = unit * max(1, round((most - least) / unit / 4))  # ticks are multiples of the margin
    multiples = range(math.ceil(least / step), math.floor(most / step) + 1)
    ticks = [(place_of(count * step), series.runs.shown(count * step)) for count in multiples]
    return {"zero": place_of(0.0), "margin": place_of(limit), "ticks": ticks, "rows": rows, "series": series}


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


def _words() -> Any:
    return templates(False).get_template("words.txt").module


def names_of(comparison: Comparison) -> dict[str, str]:
    """What the name of each strategy means."""
    return {way.label: " ".join(str(_words().explained(way)).split()) for way in comparison.ways}


def meanings(headings: Iterable[str]) -> str:
    """What the columns of a table mean."""
    known = _words().MEANINGS
    return " ".join(f"{heading}: {known[heading]}." for heading in headings if heading in known)


def render_html(comparison: Comparison) -> str:
    """Render the report as one HTML document that loads nothing from elsewhere."""
    answer, *why = story(comparison)
    first, *others = tables_of(comparison)
    program, *arguments = comparison.command.split()
    records = [record for way in comparison.ways for record in way.records]
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
            records=records,
            loads=[record for record in records if record.loaded],
            bars=_time_bars(comparison),
            errors=_error_lines(comparison),
            pairs=[_pair_marks(pairs, comparison) for pairs in series_of(comparison) if pairs.runs.n_pairs],
        )
    )


def render_text(comparison: Comparison, width: int = 80) -> str:
    """Render the report for a terminal: the answer, what explains it, the first figures, and the pairs."""
    answer, *why = story(comparison)
    first, *others = tables_of(comparison)
    shown = [first, *(table for table in others if table.title.startswith("Pairs of runs"))]
    tables = [(table.title, as_text(table.headings, table.rows, width), meanings(table.headings)) for table in shown]
    facts: dict[str, Any] = {"comparison": comparison, "answer": answer, "why": why, "names": names_of(comparison)}
    wrapped = functools.partial(_wrapped, width=width)
    return templates(False).get_template("terminal.txt").render(tables=tables, wrapped=wrapped, **facts)


def _wrapped(text: str, width: int, indent: str = "") -> str:
    """Lines of a terminal; none ends between a number and its unit."""
    filled = textwrap.fill(kept_together(text), width, break_on_hyphens=False, subsequent_indent=indent)
    return filled.replace(NO_BREAK, " ")


def as_text(headings: Iterable[str], rows: Mapping[str, Iterable[str]], width: int, *, named: str = "strategy") -> str:
    """A table for a terminal. Its first column has the names of the rows, and breaks them if it must."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(named)
    for heading in headings:
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for label, cells in rows.items():
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
    lines = (records_of(way.label, way.records, way.history) for way in comparison.ways)
    texts = {
        "report.html": render_html(comparison),
        "records.jsonl": "".join(f"{line}\n" for line in itertools.chain(*lines)),
        "summary.json": json.dumps(to_dict(comparison, story(comparison)), indent=2) + "\n",
    }
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as new:
        for name, text in texts.items():
            (Path(new) / name).write_text(text, encoding="utf-8")
        for name in texts:
            (Path(new) / name).replace(folder / name)
    return folder / "report.html"
