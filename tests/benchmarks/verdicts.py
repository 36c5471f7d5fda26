"""How often a paired test is wrong, and how often it finds an answer: simulated comparisons with known differences.

    python tests/benchmarks/verdicts.py

A comparison has a null pair, and up to 20 pairs of runs; see dshuffle/noninferiority.py. The metric of a run is 100,
plus what its pair shares (initial weights, batch seeds), plus noise. The margin is 1 %.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dshuffle.noninferiority import PairedOutcome, PairedRuns, PairedTest

METRIC, MARGIN = 100.0, 1.0
TEST = PairedTest("loss", margin="1%")
DIFFERENCES = (0.0, 0.5, 1.0, 2.0)
"""True differences, in margins."""
NOISES = (0.25, 0.5, 1.0)
"""Standard deviations of the difference of a pair, in margins."""

Noise = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Standard normal numbers."""
    return rng.standard_normal(shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...], sigma: float = 0.75) -> NDArray[np.float64]:
    """Log-normal numbers with mean 0, variance 1 and a skewness of 3.3: some runs end much worse than most."""
    variance = np.expm1(sigma**2)
    values = rng.lognormal(-(sigma**2) / 2, sigma, shape)
    return np.asarray((values - 1) / np.sqrt(variance))


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Student's t with 3 degrees of freedom, with variance 1: outliers on both sides."""
    return rng.standard_t(3, shape) / np.sqrt(3)


DISTRIBUTIONS: dict[str, tuple[Noise, float]] = {
    "normal": (normal, 1.0),
    "skewed": (skewed, 1.0),
    "heavy tails": (heavy, 1.0),
    "skewed, way scatters twice as much": (skewed, 2.0),
}
"""Noise of a run, and how much more a run with the way scatters than one with the reference."""


def comparisons(
    rng: np.random.Generator, difference: float, noise: float, draw: Noise, spread: float, count: int
) -> Iterator[PairedRuns]:
    """Simulate comparisons that end as soon as there is an answer; difference and noise are in margins."""
    of_reference = noise * MARGIN / np.hypot(1, spread)
    shape = (count, TEST.pairs)
    shared = METRIC + rng.standard_normal(shape)
    reference = shared + of_reference * draw(rng, shape)
    way = shared + difference * MARGIN + spread * of_reference * draw(rng, shape)
    null = shared[:, 0] + of_reference * draw(rng, (count,))
    for row in range(count):
        first = reference[row, 0]
        runs = PairedRuns(test=TEST, reference=(first,), way=(), null=null[row], repeated=first)
        for look in TEST.looks:
            if runs.outcome is not None:
                break
            pairs = (tuple(values[row, :look].tolist()) for values in (reference, way))
            runs = dataclasses.replace(runs, **dict(zip(("reference", "way"), pairs, strict=True)))
        yield runs


def answers(
    seed: int, difference: float, noise: float, draw: Noise, spread: float, count: int
) -> tuple[dict[PairedOutcome, float], float]:
    """Fraction of comparisons with each answer, and their mean number of pairs."""
    outcomes: Counter[PairedOutcome] = Counter()
    n_pairs = 0
    for runs in comparisons(np.random.default_rng(seed), difference, noise, draw, spread, count):
        assert runs.outcome is not None
        outcomes[runs.outcome] += 1
        n_pairs += runs.n_pairs
    return {outcome: outcomes[outcome] / count for outcome in PairedOutcome}, n_pairs / count


def main() -> None:
    """Print one row for each distribution and noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="comparisons for each cell")
    count = parser.parse_args().count
    heads = [f"difference {difference:g} margins" for difference in DIFFERENCES]
    print(f"| noise of a run | noise of a difference, in margins | {' | '.join(heads)} |")
    print(f"|---|---|{'---|' * len(heads)}")
    for name, (draw, spread) in DISTRIBUTIONS.items():
        for noise in NOISES:
            cells = []
            for number, difference in enumerate(DIFFERENCES):
                fractions, n_pairs = answers(number, difference, noise, draw, spread, count)
                not_worse, worse = (f"{fractions[kind]:.1%}" for kind in (PairedOutcome.NOT_WORSE, PairedOutcome.WORSE))
                cells.append(f"{not_worse} / {worse} ({n_pairs:.1f})")
            print(f"| {name} | {noise:g} | {' | '.join(cells)} |".replace("%", " %"), flush=True)


if __name__ == "__main__":
    main()
