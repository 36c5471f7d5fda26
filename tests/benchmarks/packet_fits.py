"""Fit packets of real plans: the coefficients in dshuffle/planning/delivery, and how far they are off.

    python tests/benchmarks/packet_fits.py plans.jsonl

Plans that FILE has counted already are not made again; all take about 20 minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dshuffle.planning import Choices, parse_assignment
from dshuffle.planning.cost.job import Work
from dshuffle.planning.delivery.packets_from_server import features
from dshuffle.planning.packet_counts import survey

WORKERS = (3, 4, 6, 8, 12, 16, 20, 32, 48, 64)
ALPHAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
DRAWS = {"global": ("uniform", 1), "aligned": ("even", 4)}  # caching, and epochs until caches are steady


def settings(samples: tuple[int, ...]) -> Iterator[tuple[int, int, float, str]]:
    """(q, n, alpha, assignment), small jobs first."""
    for q in samples:
        for n, alpha, assignment in itertools.product(WORKERS, ALPHAS, DRAWS):
            if alpha * n >= 1.2 and q >= 30 * n and (q <= 100_000 or n <= 20):
                yield q, n, alpha, assignment
        for n, held in itertools.product((96, 128, 256, 512, 1024), (2, 3, 4, 8, 16)):
            if q >= max(30 * n, 30_000) and (q <= 100_000 or held <= 8):
                yield q, n, held / n, "global"


def count(q: int, n: int, alpha: float, assignment: str) -> dict[str, Any]:
    """Packets of real plans."""
    caching, epochs = DRAWS[assignment]
    deliveries = ["clique"] if n > 32 else ["coded", "ubershuffle", "clique"]
    choices = Choices(parse_assignment(assignment), caching=caching, cache_fraction=alpha)
    figures = survey(q, n, choices, deliveries=deliveries, epochs=epochs, bounds=False)
    packets = {row.name: row.packets for row in figures}
    return {"q": q, "n": n, "a": alpha, "asg": assignment, "needed": figures[0].needed, "packets": packets}


def fit(rows: list[dict[str, Any]], delivery: str, aligned: bool) -> None:
    """Print coefficients and errors of one delivery."""
    points, logs, bounds = [], [], []
    for row in rows:
        if delivery not in row["packets"] or (row["asg"] == "aligned") != aligned or row["q"] < 30 * row["n"]:
            continue
        work = Work(row["q"], 1, Choices(assignment=row["asg"], caching=DRAWS[row["asg"]][0], cache_fraction=row["a"]))
        sets = work.holder_sets(row["n"], row["needed"])
        points.append(features(sets))
        logs.append(np.log(row["packets"][delivery] / sets.bound))
        bounds.append(np.log(row["needed"] / sets.bound))
    coefficients, *_ = np.linalg.lstsq(np.array(points), np.array(logs))
    rounded = [float(f"{value:.4g}") for value in coefficients]
    errors = np.abs(np.expm1(np.clip(points @ np.array(rounded), 0, bounds) - logs))
    quantiles = ", ".join(f"{100 * part:g} %: {np.quantile(errors, part):.3f}" for part in (0.5, 0.95, 1))
    print(f"({delivery!r}, {aligned}): {tuple(rounded)},\n    {len(logs)} plans, relative errors {quantiles}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, metavar="FILE")
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 100_000, 300_000])
    options = parser.parse_args(argv)
    rows = [json.loads(line) for line in options.plans.read_text().splitlines()] if options.plans.exists() else []
    known = {(row["q"], row["n"], row["a"], row["asg"]) for row in rows}
    with options.plans.open("a") as file:
        for setting in settings(tuple(options.samples)):
            if setting not in known:
                rows.append(count(*setting))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    fitted = [("clique", False), ("ubershuffle", False), ("clique", True), ("coded", True), ("ubershuffle", True)]
    for delivery, aligned in fitted:
        fit(rows, delivery, aligned)


if __name__ == "__main__":
    main()
