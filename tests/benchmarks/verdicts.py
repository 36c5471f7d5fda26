"""How often a paired test is wrong, and how often it finds an answer: simulated comparisons with known differences.

    python tests/benchmarks/verdicts.py

A comparison has a null pair, and up to 20 pairs of runs; see dshuffle/noninferiority/. The metric of a run is 100,
plus what its pair shares (initial weights, batch seeds), plus noise. The margin is 1 %.

A second table has accuracies on few samples. A run with the way differs from that with the reference in the samples
that it loses, and perhaps in some that each of them loses by chance.
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

ACCURACIES = ((30, 0.01), (100, 0.01), (200, 0.005))
"""Numbers of samples that an accuracy is measured on, and margins."""
LOST_BY_CHANCE = (0.0, 0.005)
"""Fraction of the samples that a run loses by chance. Without any, the differences of all pairs may be equal."""
ERRORS = 0.05
"""Fraction of the samples that both runs of a pair lose."""


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
    return ended(TEST, reference, way, null)


def coarse_comparisons(
    rng: np.random.Generator, difference: float, samples: int, margin: float, by_chance: float, count: int
) -> Iterator[PairedRuns]:
    """Simulate comparisons of accuracies, which end as soon as there is an answer; the difference is in margins."""
    test = PairedTest("accuracy", margin=margin, higher_is_better=True)
    shape = (count, test.pairs)
    shared = samples - rng.binomial(samples, ERRORS, shape)
    reference, way = (shared - rng.binomial(samples, by_chance, shape) for _ in range(2))
    way -= rng.binomial(samples, difference * margin, shape)
    null = shared[:, 0] - rng.binomial(samples, by_chance, count)
    return ended(test, reference / samples, way / samples, null / samples)


def ended(
    test: PairedTest, reference: NDArray[np.float64], way: NDArray[np.float64], null: NDArray[np.float64]
) -> Iterator[PairedRuns]:
    """Add pairs to each comparison, look by look, until it has an answer."""
    for row in range(len(null)):
        first = float(reference[row, 0])
        runs = PairedRuns(test=test, reference=(first,), way=(), null=float(null[row]), repeated=first)
        for look in test.looks:
            if runs.outcome is not None:
                break
            pairs = (tuple(values[row, :look].tolist()) for values in (reference, way))
            runs = dataclasses.replace(runs, **dict(zip(("reference", "way"), pairs, strict=True)))
        yield runs


Answers = tuple[dict[PairedOutcome, float], float]
"""Fraction of comparisons with each answer, and their mean number of pairs."""


def answers(seed: int, difference: float, noise: float, draw: Noise, spread: float, count: int) -> Answers:
    """Simulate comparisons of a metric with noise."""
    return _counted(comparisons(np.random.default_rng(seed), difference, noise, draw, spread, count))


def coarse_answers(seed: int, difference: float, samples: int, margin: float, by_chance: float, count: int) -> Answers:
    """Simulate comparisons of accuracies on few samples."""
    rng = np.random.default_rng(seed)
    return _counted(coarse_comparisons(rng, difference, samples, margin, by_chance, count))


def _counted(compared: Iterator[PairedRuns]) -> Answers:
    outcomes: Counter[PairedOutcome] = Counter()
    n_pairs = 0
    for runs in compared:
        assert runs.outcome is not None
        outcomes[runs.outcome] += 1
        n_pairs += runs.n_pairs
    count = outcomes.total()
    return {outcome: outcomes[outcome] / count for outcome in PairedOutcome}, n_pairs / count


def main() -> None:
    """Print one row for each distribution and noise, and one for each accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="comparisons for each cell")
    count = parser.parse_args().count
    _print_head("noise of a run", "noise of a difference, in margins")
    for name, (draw, spread) in DISTRIBUTIONS.items():
        for noise in NOISES:
            cells = [answers(place, size, noise, draw, spread, count) for place, size in enumerate(DIFFERENCES)]
            _print_row(name, f"{noise:g}", cells)
    print()
    _print_head("samples, margin", "lost by chance")
    for samples, margin in ACCURACIES:
        for by_chance in LOST_BY_CHANCE:
            cells = [
                coarse_answers(place, size, samples, margin, by_chance, count) for place, size in enumerate(DIFFERENCES)
            ]
            _print_row(f"{samples}, {margin:g}", f"{by_chance:.1%}", cells)


def _print_head(*names: str) -> None:
    heads = [*names, *(f"difference {difference:g} margins" for difference in DIFFERENCES)]
    print(f"| {' | '.join(heads)} |")
    print(f"|{'---|' * len(heads)}")


def _print_row(first: str, second: str, cells: list[Answers]) -> None:
    texts = []
    for fractions, n_pairs in cells:
        not_worse, worse = (f"{fractions[kind]:.1%}" for kind in (PairedOutcome.NOT_WORSE, PairedOutcome.WORSE))
        texts.append(f"{not_worse} / {worse} ({n_pairs:.1f})")
    print(f"| {first} | {second} | {' | '.join(texts)} |".replace("%", " %"), flush=True)


if __name__ == "__main__":
    main()
