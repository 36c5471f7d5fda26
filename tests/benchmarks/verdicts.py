"""How often the answer of a comparison is wrong: the whole program, simulated with a truth that is known.

    python tests/benchmarks/verdicts.py [--count 1000] [--table numbers|accuracy|diverging]

A comparison draws a dataset from a population. Each pair holds out another tenth of it, trains both ways on the rest in
closed form, and measures both on that tenth. Pairs, looks and answer are those of dshuffle/noninferiority.py.

The model of a run predicts the mean of its training samples, plus what it has wrongly learned: a multiple of a
coordinate z of the sample for the way, and of another one for the reference. Its loss is the mean squared error. So the
difference of the true losses is that of two squares, and how much it scatters between held-out tenths depends on their
sum. "runs" have noise that comes from the seeds of the runs in place of that of the samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.noninferiority import PairedOutcome, PairedRuns, PairedTest

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]
HELD_OUT = 0.1
RATIO = HELD_OUT / (1 - HELD_OUT)
"""Held-out samples for each training sample."""

TENTHS = (300, 1000, 5000)
NOISES = (0.5, 1.0)
"""Standard deviations of the difference of a pair, in margins."""


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Standard normal numbers."""
    return rng.standard_normal(shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...], sigma: float = 0.75) -> NDArray[np.float64]:
    """Log-normal numbers with mean 0, variance 1 and a skewness of 3.3: some runs end much worse than most."""
    values = rng.lognormal(-(sigma**2) / 2, sigma, shape)
    return np.asarray((values - 1) / math.sqrt(math.expm1(sigma**2)))


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Student's t with 3 degrees of freedom, with variance 1: outliers on both sides."""
    return rng.standard_t(3, shape) / math.sqrt(3)


DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "normal": (normal, 1.0),
    "log-normal": (skewed, 1.0),
    "heavy tails": (heavy, 1.0),
    "log-normal, the way scatters twice as much": (skewed, 2.0),
}
"""What numbers are drawn from, and how much more a run with the way scatters than one with the reference."""


@dataclass(frozen=True)
class Cell:
    """Settings of simulated comparisons: the difference of the true losses in margins, and where noise comes from."""

    draw: Draw
    tenth: int
    noise: float
    source: str
    truth: float
    spread: float = 1.0
    pairs: int = 20


@dataclass
class Counts:
    """What happened in simulated comparisons."""

    not_worse: int = 0
    worse: int = 0
    covered: int = 0
    pairs: int = 0
    count: int = 0

    def add(self, runs: PairedRuns, truth: float) -> None:
        """Count the answer of one comparison, whose true difference is given in margins."""
        least, most = runs.interval
        self.count += 1
        self.pairs += runs.n_pairs
        self.not_worse += runs.outcome is PairedOutcome.NOT_WORSE
        self.worse += runs.outcome is PairedOutcome.WORSE
        self.covered += least <= truth * runs.limit <= most

    def __str__(self) -> str:
        rates = (self.not_worse, self.worse, self.covered)
        texts = " / ".join(f"{100 * rate / self.count:.1f} %" for rate in rates)
        return f"{texts} ({self.pairs / self.count:.1f})"


def split(rng: np.random.Generator, n_samples: int, pairs: int) -> NDArray[np.int64]:
    """The held-out samples of every pair."""
    size = round(HELD_OUT * n_samples)
    return np.array([rng.choice(n_samples, size, replace=False, shuffle=False) for _ in range(pairs)])


def metrics(rng: np.random.Generator, cell: Cell) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Metrics of the reference and of the way in every pair of one comparison, and the margin as a fraction."""
    n_samples, size = round(cell.tenth / HELD_OUT), cell.tenth
    of_samples = cell.source == "samples"
    # Wrongly learned squares: their difference is the truth, and their sum makes the noise of held-out samples.
    total = 4.0
    margin = 4 * total / (cell.noise**2 * size) if of_samples else 0.02
    a2, b2 = ((total * margin + sign * cell.truth * margin) / 2 for sign in (1, -1))
    if not of_samples:
        a2, b2 = cell.truth * margin, 0.0
    y = cell.draw(rng, (n_samples,))
    z, z_reference = rng.choice((-1.0, 1.0), (2, n_samples))
    held_out = split(rng, n_samples, cell.pairs)
    tested = y[held_out]
    trained = (y.sum() - tested.sum(1, keepdims=True)) / (n_samples - size)
    reference = ((tested - trained - math.sqrt(b2) * z_reference[held_out]) ** 2).mean(1)
    if of_samples:
        way = ((tested - trained - math.sqrt(a2) * z[held_out]) ** 2).mean(1)
    else:
        way = reference + a2
        scale = cell.noise * margin / math.hypot(1, cell.spread)
        way = way + cell.spread * scale * cell.draw(rng, (cell.pairs,))
        reference = reference + scale * cell.draw(rng, (cell.pairs,))
    return reference, way, margin / (1 + b2 + 1 / (n_samples - size))


def accuracies(
    rng: np.random.Generator, tenth: int, noise: float, truth: float, margin: float = 0.01, pairs: int = 20
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accuracies of both ways on held-out samples, of which both get some wrong, and each gets others wrong."""
    n_samples = round(tenth / HELD_OUT)
    differ = noise**2 * margin**2 * tenth
    lost, won = (differ + truth * margin) / 2, (differ - truth * margin) / 2
    kinds = rng.choice(4, n_samples, p=[0.9 - lost, lost, won, 0.1 - won])
    held_out = kinds[split(rng, n_samples, pairs)]
    return np.isin(held_out, (0, 1)).mean(1), np.isin(held_out, (0, 2)).mean(1)


def answered(
    test: PairedTest, reference: NDArray[np.float64], way: NDArray[np.float64], ratio: float = RATIO
) -> PairedRuns:
    """Add pairs, look by look, until there is an answer."""
    runs = PairedRuns(test=test, reference=(), way=(), test_to_train=ratio)
    for look in test.looks:
        runs = dataclasses.replace(runs, reference=tuple(reference[:look].tolist()), way=tuple(way[:look].tolist()))
        if runs.outcome is not None:
            break
    return runs


def numbers(cell: Cell, count: int, seed: int, ratio: float = RATIO) -> Counts:
    """Simulate comparisons of mean squared errors."""
    rng, counts = np.random.default_rng(seed), Counts()
    for _ in range(count):
        reference, way, margin = metrics(rng, cell)
        test = PairedTest("mse", margin=f"{100 * margin}%", pairs=cell.pairs)
        counts.add(answered(test, reference, way, ratio), cell.truth)
    return counts


def accuracy(tenth: int, noise: float, truth: float, count: int, seed: int, pairs: int = 20) -> Counts:
    """Simulate comparisons of accuracies, which have ties."""
    rng, counts = np.random.default_rng(seed), Counts()
    test = PairedTest("accuracy", margin=0.01, pairs=pairs)
    for _ in range(count):
        counts.add(answered(test, *accuracies(rng, tenth, noise, truth, pairs=pairs)), truth)
    return counts


def diverging(probabilities: tuple[float, float], count: int, seed: int, pairs: int = 20) -> Counts:
    """Simulate equal ways whose runs diverge with these probabilities: of the reference, and of the way."""
    rng, counts = np.random.default_rng(seed), Counts()
    test = PairedTest("loss", margin="1%", pairs=pairs)
    for _ in range(count):
        both = 1 + 0.005 * rng.standard_normal((2, pairs))
        both[rng.random((2, pairs)) < np.array(probabilities)[:, np.newaxis]] = np.nan
        counts.add(answered(test, *both), 0.0)
    return counts


def main() -> None:
    """Print the tables of docs/comparing-and-predicting.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="comparisons for each cell")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--table", choices=("numbers", "accuracy", "diverging"), action="append")
    options = parser.parse_args()
    tables, count, pairs = options.table or ["numbers", "accuracy", "diverging"], options.count, options.pairs
    began = time.perf_counter()
    if "numbers" in tables:
        print(
            "| population | noise from | held out | noise, margins | equal | at the margin |\n|---|---|---|---|---|---|"
        )
        for name, (draw, spread) in DISTRIBUTIONS.items():
            for source in ("samples", "runs") if spread == 1 else ("runs",):
                for tenth in TENTHS if source == "samples" else TENTHS[1:2]:
                    for noise in NOISES:
                        cells = [
                            numbers(Cell(draw, tenth, noise, source, truth, spread, pairs), count, int(truth))
                            for truth in (0.0, 1.0)
                        ]
                        print(f"| {name} | {source} | {tenth:,} | {noise} | {cells[0]} | {cells[1]} |", flush=True)
    if "accuracy" in tables:
        print("\n| held out | noise, margins | equal | at the margin |\n|---|---|---|---|")
        for tenth in (500, 2000):
            for noise in NOISES:
                cells = [accuracy(tenth, noise, truth, count, int(truth), pairs) for truth in (0.0, 1.0)]
                print(f"| {tenth:,} | {noise} | {cells[0]} | {cells[1]} |", flush=True)
    if "diverging" in tables:
        print("\n| reference diverges | the way diverges | answers |\n|---|---|---|")
        for both in ((0.05, 0.05), (0.2, 0.2), (0.5, 0.5), (0.0, 0.05), (0.0, 0.2), (0.0, 0.5), (0.0, 1.0)):
            print(
                f"| {both[0]:.0%} | {both[1]:.0%} | {diverging(both, count, 0, pairs)} |".replace("%", " %"), flush=True
            )
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
