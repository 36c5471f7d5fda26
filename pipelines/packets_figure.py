"""Plot the packets of every coded delivery against the cache fraction.

    python pipelines/packets_figure.py [--samples 10000 --samples 100000] [--output packets-figure]

The script writes packets.csv and packets.html, for 20 workers and depth 2. Caches are new and uniformly random, as in
the paper's simulation; `aligned` uses even caches after five epochs. 1e4 and 1e5 samples take about ten seconds. 1e6
samples take two minutes more.

References
----------
Chung et al. (2017), Figure 5. `clique`, `aligned` and the lower bound are added here. See docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from bokeh.plotting import figure
from rich.progress import track
from studies.bounds import lower_bound
from studies.scripts import at_least, chart_page

from dshuffle.planning import Aligned, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.delivery import coded_rate

N_WORKERS = 20
FRACTIONS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55)
CODED = ("coded", "ubershuffle", "clique")
# Okabe and Ito's palette for colour-blind readers.
COLOURS = {
    "uncoded": "#8A8F98",
    "coded": "#D55E00",
    "ubershuffle": "#E69F00",
    "clique": "#0072B2",
    "aligned": "#009E73",
    "lower bound": "#CC79A7",
}
Row = dict[str, float]


def planned(n_samples: int, choices: Choices, epochs: int = 1) -> tuple[int, int]:
    """Packets of the last of these epochs, and samples that it delivers."""
    planner = EpochPlanner(ShuffleSpec(n_samples, N_WORKERS, choices))
    planner.load()
    for _ in range(epochs):
        plan = planner.advance()
    return plan.packets.n_packets, plan.n_needed


def packets(n_samples: int, fraction: float, seed: int) -> Row:
    """Packets by name for one number of samples and one cache fraction."""
    row: Row = {"samples": n_samples, "cache_fraction": fraction}
    for name in CODED:
        row[name], row["uncoded"] = planned(n_samples, Choices(delivery=name, cache_fraction=fraction, seed=seed))
    spec = ShuffleSpec(n_samples, N_WORKERS, Choices(delivery=CODED[0], cache_fraction=fraction, seed=seed))
    first = spec.draw_first()
    holders = spec.policy().first(first.ranks)
    row["lower bound"] = lower_bound(holders, spec.draw(first, 1, holders).ranks, N_WORKERS)
    row["theorem 2"] = coded_rate(n_samples, N_WORKERS, spec.capacity)
    if (fraction * N_WORKERS) % 1 < 1e-9:  # even caches need an integer number of holders per sample
        choices = Choices(Aligned(), "clique", caching="even", cache_fraction=fraction, seed=seed)
        row["aligned"], _ = planned(n_samples, choices, epochs=5)
    return row


TEXT = (
    "Packets as a fraction of the samples. The lower bound is for a uniform draw (global) and new caches. The "
    "assignment aligned may be below it, because it draws another shuffle, whose packets it chooses first."
)


def draw(rows: list[Row]) -> str:
    """Return a page with one plot for each number of samples."""
    plots = []
    for n_samples in sorted({row["samples"] for row in rows}):
        plot = figure(
            x_axis_label="cache fraction",
            y_axis_label="packets / samples",
            y_axis_type="log",
            height=380,
        )
        for name, colour in COLOURS.items():
            here = [row for row in rows if row["samples"] == n_samples and name in row]
            points = [(row["cache_fraction"], row[name] / n_samples) for row in here]
            if points:
                x, y = zip(*points, strict=True)
                dash = "dashed" if name == "lower bound" else "solid"
                plot.line(x, y, color=colour, line_width=2, line_dash=dash, legend_label=name)
                plot.scatter(x, y, color=colour, size=6, legend_label=name)
        plot.add_layout(plot.legend[0], "right")  # it would hide the lines
        plots.append((f"{n_samples:,.0f} samples, {N_WORKERS} workers", [plot]))
    return chart_page("Packets of coded deliveries", TEXT, plots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples",
        type=at_least(1),
        action="append",
        help="number of samples; may be repeated (default: 10000 and 100000)",
    )
    parser.add_argument("--output", type=Path, default=Path("packets-figure"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = [(q, fraction) for q in options.samples or (10_000, 100_000) for fraction in FRACTIONS]
    rows = [packets(q, fraction, options.seed) for q, fraction in track(settings, "planning")]
    options.output.mkdir(parents=True, exist_ok=True)
    names = ["samples", "cache_fraction", *COLOURS, "theorem 2"]
    with (options.output / "packets.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    (options.output / "packets.html").write_text(draw(rows), encoding="utf-8")
    for row in rows:
        print("  ".join(f"{name} {row[name]:,.6g}" for name in names if name in row))
    print(f"wrote {options.output}/packets.csv and packets.html")


if __name__ == "__main__":
    main()
