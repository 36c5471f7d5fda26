"""``report.html``: one self-contained file for wide and narrow screens, in light and dark mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bokeh.embed import components

from dshuffle.report.charts import Chart, Key, charts
from dshuffle.report.colours import way_colour
from dshuffle.report.page import page
from dshuffle.report.pair_chart import pair_chart
from dshuffle.report.summary import CPU_BOUND, Comparison, WayResult, corrected, figures, has_errors
from dshuffle.report.swatches import line_swatch, swatch
from dshuffle.report.tables import (
    PAIR_HEADINGS,
    STORE_HEADINGS,
    STORE_MEANING,
    TIME_CAPTION,
    TIME_HEADINGS,
    TRAFFIC_CAPTION,
    TRAFFIC_HEADINGS,
    epochs_of,
    error_cells,
    metric_cells,
    metrics_of,
    pair_caption,
    pair_cells,
    quality_caption,
    quality_cells,
    quality_headings,
    short_caption,
    short_cells,
    short_headings,
    store_cells,
    tested_ways,
    time_cells,
    traffic_cells,
)
from dshuffle.report.verdict import verdict_sentences
from dshuffle.units import NO_BREAK, human_bytes, human_count, human_seconds, kept_together

Cells = Callable[[WayResult], tuple[str, ...]]


def render_html(comparison: Comparison) -> str:
    """Render the report as one HTML document that loads nothing from elsewhere."""
    plots = [*charts(comparison), *filter(None, [pair_chart(comparison)])]
    script, divisions = components([chart.figure for chart in plots])
    mixing, short = quality_headings(comparison), short_cells(comparison)

    def table(headings: Sequence[str], cells: Cells) -> str:
        rows = [(way.label, way_colour(place), cells(way)) for place, way in enumerate(comparison.ways)]
        return _table(("way", *headings), rows)

    answer, *details = verdict_sentences(comparison)
    sentences = "\n".join(f'<p class="verdict">{_text(sentence)}</p>' for sentence in details)
    time, phases, traffic, *others = (_figure(*pair) for pair in zip(plots, divisions, strict=True))
    n_lines = sum(chart.lines for chart in plots)
    errors, pairs = others[:n_lines], others[n_lines:]
    body = f"""<header>
<p class="name">{_program(comparison.command)}</p>
<h1>{_text(answer)}</h1>
{sentences}
<p class="facts">{_text(_headline(comparison))}</p>{_outlook(comparison.outlook)}{_emulated(comparison.emulated)}
</header>
{time}
<section>
{table(short_headings(comparison), lambda way: short[way.label])}
<p class="caption">{_text(short_caption(comparison))}</p>
</section>
{_elsewhere(comparison)}
{f'<section class="charts">{"".join(errors)}</section>' if errors else ""}
{"".join(pairs)}
{_pairs(comparison)}
<details open>
<summary>Times in detail</summary>
{phases}
{table(TIME_HEADINGS, time_cells)}
<p class="caption">{_text(TIME_CAPTION)}</p>
</details>
<details open>
<summary>Traffic</summary>
{traffic}
{table((*TRAFFIC_HEADINGS, *STORE_HEADINGS), lambda way: (*traffic_cells(way), *store_cells(way)))}
<p class="caption">{_text(f"{TRAFFIC_CAPTION} {STORE_MEANING}")}</p>
</details>
<details open>
<summary>Mixing</summary>
{table(mixing, lambda way: quality_cells(way, mixing))}
<p class="caption">{_text(quality_caption(comparison))}</p>
</details>
{_errors_in_numbers(comparison, table)}
<section>
<h2>How to repeat this run</h2>
<pre>{escape(comparison.command)}</pre>
<div class="facts-grid">
{_facts("Settings", {"seed": comparison.seed, **comparison.settings})}
{_facts("Dataset", comparison.dataset)}
{_facts("Cluster", comparison.cluster)}
{_facts("Machine", comparison.machine)}
{_facts("Versions", comparison.versions)}
</div>
<p class="caption">Beside this file, records.jsonl has one record for each epoch of each way, and summary.json has the
figures.</p>
</section>"""
    return page(f"{_program(comparison.command)}: {answer}", body, script)


def _errors_in_numbers(comparison: Comparison, table: Callable[[Sequence[str], Cells], str]) -> str:
    """The error and each metric after each epoch; nothing if none was reported."""
    epochs = epochs_of(comparison)
    headings = tuple(map(str, epochs))

    def numbers(cells: Mapping[str, tuple[str, ...]]) -> str:
        return table(headings, lambda way: cells[way.label])

    tables = [numbers(error_cells(comparison, epochs))] if has_errors(comparison) else []
    tables += [
        f"<h3>{_text(metric)}</h3>\n{numbers(metric_cells(comparison, metric, epochs))}"
        for metric in metrics_of(comparison)
    ]
    if not tables:
        return ""
    meaning = f"{comparison.error_meaning}, after each epoch. " if has_errors(comparison) else ""
    caption = f'<p class="caption">{_text(meaning[:1].upper() + meaning[1:])}</p>\n' if meaning else ""
    return f"<details open>\n<summary>After each epoch, in numbers</summary>\n{caption}{''.join(tables)}\n</details>"


def _elsewhere(comparison: Comparison) -> str:
    """Predicted exchanges on other links."""
    predicted = [
        (place, way) for place, way in enumerate(comparison.ways) if way.on_other_links and way.choices.assignment.moves
    ]
    if not predicted:
        return ""
    names = tuple(predicted[0][1].on_other_links)
    rows, busy = [], 0
    for place, way in predicted:
        seconds = (way.on_other_links.get(name) for name in names)
        cells = tuple(human_seconds(None if second is None else corrected(way, second)) for second in seconds)
        idle = figures(way).cpu_idle
        is_busy = idle is not None and idle < CPU_BOUND
        busy += is_busy
        rows.append((f"{way.label} *" if is_busy else way.label, way_colour(place), cells))
    mark = (
        f" * The processors were idle for less than {100 * CPU_BOUND:.0f} % of such an exchange in this run. They may "
        "limit it on faster links, too, so it may take longer than this."
    )
    caption = (
        "Predicted by the cost model for links of these rates, with the data, workers, processors and store of this "
        "run. Predictions are scaled by the ratio of measured to predicted time in this run. If processors limited "
        "the exchanges, the difference is added instead."
        f"{mark if busy else ''} An epoch with an exchange takes as long as the exchange or the training, whichever is "
        "longer. dshuffle advise predicts other data, workers and stores."
    )
    return f"""<section>
<h2>An exchange on other links</h2>
{_table(("way", *names), rows)}
<p class="caption">{_text(caption)}</p>
</section>"""


def _pairs(comparison: Comparison) -> str:
    """The pairs of runs in numbers."""
    tested = tested_ways(comparison)
    if not tested:
        return ""
    cells = pair_cells(comparison)
    rows = [(way.label, way_colour(place), cells[way.label]) for place, way, _ in tested]
    return f"""<section>
<h2>{_text(tested[0][2].test.metric)} in pairs of runs</h2>
{_table(("way", *PAIR_HEADINGS), rows)}
<p class="caption">{_text(pair_caption(comparison))}</p>
</section>"""


def _outlook(sentences: Sequence[str]) -> str:
    return f"<p class='facts'>Before the run: {_text(' '.join(sentences))}</p>" if sentences else ""


def _emulated(text: str) -> str:
    return f"<p class='emulated'>Emulated: {_text(text)}</p>" if text else ""


def _program(command: str) -> str:
    """The command that wrote the report, without its arguments; "dshuffle" for a script."""
    program, *arguments = command.split()
    return " ".join([program, *arguments[:1]]) if program == "dshuffle" else "dshuffle"


def _headline(comparison: Comparison) -> str:
    records = [record for way in comparison.ways for record in way.records]
    if not records:
        return "No epoch was recorded."
    first = records[0]
    return (
        f"{human_count(first.n_samples)} samples of {human_bytes(first.row_nbytes)} on {first.n_workers} "
        f"workers, {max(len(way.records) for way in comparison.ways)} epochs per way, seed {comparison.seed}."
    )


def _table(headings: Sequence[str], rows: Iterable[tuple[str, str, tuple[str, ...]]]) -> str:
    head = "".join(f"<th scope='col'>{_text(heading)}</th>" for heading in headings)
    body = "\n".join(
        f"<tr><th scope='row'><span>{swatch(colour)}<span>{_text(label)}</span></span></th>"
        + "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, colour, cells in rows
    )
    return (
        f"<div class='scroll' tabindex='0'><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(chart: Chart, division: str) -> str:
    return f"""<figure>
<h2>{_text(chart.title)}</h2>
<p class="key">{_switches(chart.key) if chart.lines else _key(chart.key)}</p>
{division}
<figcaption class="caption">{_text(chart.caption)}</figcaption>
</figure>"""


def _key(key: Key) -> str:
    return " ".join(f"<span>{swatch(colour) if colour else ''}{_text(meaning)}</span>" for colour, meaning in key)


def _switches(key: Key) -> str:
    """A key that shows and hides lines; see ``theme.js``."""
    return " ".join(
        f"<button type='button' aria-pressed='true' data-line='{escape(name)}'>{line_swatch(place)}{_text(name)}"
        "</button>"
        for place, (_, name) in enumerate(key)
    )


def _text(text: str) -> str:
    """Text in which no line ends within a number such as 1.2e-07, or between a number and its unit."""
    unbroken = kept_together(text).replace(f"{NO_BREAK}-{NO_BREAK}", f"{NO_BREAK}\u2212{NO_BREAK}")
    return re.sub(r"(?<=\de)-(?=\d)", "\u2011", escape(unbroken))


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(_fact(value))}</dd>" for name, value in facts.items())
    return f"<div><h3>{escape(title)}</h3><dl>{rows}</dl></div>"


def _fact(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
