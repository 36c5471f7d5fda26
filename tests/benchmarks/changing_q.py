"""Rules that change Q of partial exchanges between epochs, against a constant Q that sends as many samples.

    python tests/benchmarks/changing_q.py [--model regression] [--pairs 20]

Both runs of a pair share the seed. Assignments and orders are those of a session; models train in this process. From
shards of the stored order, a rule is also compared with a constant Q from random shards. The rules: Q rises with the
spread of the losses of the workers' samples before the exchange (``loss``), or of their gradients (``gradients``);
doubles if the training loss fell by less than 5 %, and otherwise halves (``plateau``); begins with (n - 1) / n, and
what is above 0.01 halves in every epoch (``falling``); or the same backwards (``rising``). None was reliably better
than a constant Q (docs/design.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import click
import numba
import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from dshuffle.planning import first_ranks
from dshuffle.planning.assignment.slots import SlotExchange, path_of
from dshuffle.planning.grouping import group_by
from dshuffle.planning.order import epoch_permutation
from dshuffle.synthetic import keyed_regression, rare_keys_regression
from dshuffle.training import Network
from dshuffle.training.synchronous import MOMENTUM

Numbers = NDArray[Any]
LEAST_Q = 0.01
TRAINED_DIGITS = 1200


class Model(Protocol):
    """What trains. A state is the averaged model; rows are those of its ``n_samples`` training samples."""

    n_samples: int
    n_workers: int
    n_epochs: int

    def start(self, seed: int) -> Any:
        """State before the first epoch."""

    def trained(self, state: Any, orders: Sequence[Numbers], factor: float) -> Any:
        """State after each worker has trained on its rows in this order, with the step times ``factor``."""

    def loss(self, state: Any) -> float:
        """Held-out loss, or how far the training loss is above its minimum."""

    def row_losses(self, state: Any) -> Numbers:
        """``(n_samples,)`` training losses."""

    def gradients(self, state: Any, rows: Numbers) -> Numbers:
        """``(k, p)`` gradients of these rows, or of mini-batches of them."""


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _pass(x: Numbers, y: Numbers, order: Numbers, weights: Numbers, step: float) -> None:
    """SGD on single rows for the squared error, in place."""
    for row in order:
        error = -y[row]
        for j in range(len(weights)):
            error += weights[j] * x[row, j]
        for j in range(len(weights)):
            weights[j] -= step * error * x[row, j]


@dataclass
class Regression:
    """Parallel SGD for linear regression: models are averaged after each epoch."""

    x: Numbers
    y: Numbers
    held_out: tuple[Numbers, Numbers] | None
    step: float
    n_workers: int
    n_epochs: int
    optimum: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.n_samples = len(self.x)
        if self.held_out is None:
            weights = np.linalg.lstsq(self.x, self.y, rcond=None)[0]
            self.optimum = float(self.row_losses(weights).mean())

    def start(self, seed: int) -> Numbers:
        return np.zeros(self.x.shape[1])

    def trained(self, state: Numbers, orders: Sequence[Numbers], factor: float) -> Numbers:
        local = np.tile(state, (len(orders), 1))
        for weights, order in zip(local, orders, strict=True):
            _pass(self.x, self.y, order, weights, self.step * factor)
        return np.average(local, axis=0, weights=[len(order) for order in orders])

    def loss(self, state: Numbers) -> float:
        if self.held_out is None:
            return float(self.row_losses(state).mean()) - self.optimum
        x, y = self.held_out
        return math.sqrt(np.mean((x @ state - y) ** 2))

    def row_losses(self, state: Numbers) -> Numbers:
        return np.asarray((self.x @ state - self.y) ** 2)

    def gradients(self, state: Numbers, rows: Numbers) -> Numbers:
        return np.asarray((self.x[rows] @ state - self.y[rows])[:, np.newaxis] * self.x[rows])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _softmax_pass(x: Numbers, y: Numbers, order: Numbers, weights: Numbers, step: float) -> None:
    """SGD on single rows for the cross-entropy, in place."""
    for row in order:
        scores = np.zeros(weights.shape[1])
        for j in range(len(weights)):
            for k in range(len(scores)):
                scores[k] += weights[j, k] * x[row, j]
        errors = np.exp(scores - scores.max())
        errors /= errors.sum()
        errors[y[row]] -= 1
        for j in range(len(weights)):
            for k in range(len(scores)):
                weights[j, k] -= step * errors[k] * x[row, j]


@dataclass
class Softmax:
    """Parallel SGD for softmax regression: models are averaged after each epoch."""

    x: Numbers
    y: Numbers
    held_out: tuple[Numbers, Numbers]
    step: float
    n_workers: int
    n_epochs: int

    def __post_init__(self) -> None:
        self.n_samples = len(self.x)

    def start(self, seed: int) -> Numbers:
        return np.zeros((self.x.shape[1], 10))

    def trained(self, state: Numbers, orders: Sequence[Numbers], factor: float) -> Numbers:
        local = np.tile(state, (len(orders), 1, 1))
        for weights, order in zip(local, orders, strict=True):
            _softmax_pass(self.x, self.y, order, weights, self.step * factor)
        return np.average(local, axis=0, weights=[len(order) for order in orders])

    def loss(self, state: Numbers) -> float:
        x, y = self.held_out
        return float(cross_entropy(x @ state, y).mean())

    def row_losses(self, state: Numbers) -> Numbers:
        return cross_entropy(self.x @ state, self.y)

    def gradients(self, state: Numbers, rows: Numbers) -> Numbers:
        scores = self.x[rows] @ state
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(len(rows)), self.y[rows]] -= 1
        return np.asarray(errors[:, np.newaxis, :] * self.x[rows][:, :, np.newaxis])


def cross_entropy(scores: Numbers, labels: Numbers) -> Numbers:
    """Cross-entropy of each row."""
    scores = scores - scores.max(axis=1, keepdims=True)
    return np.asarray(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels])


@dataclass
class Perceptron:
    """Synchronous SGD with a network: gradients are averaged in each step, statistics of batch norm as well."""

    network: Network
    x: Numbers
    y: Numbers
    held_out: tuple[Numbers, Numbers]
    step: float
    batch_size: int
    n_workers: int
    n_epochs: int

    def __post_init__(self) -> None:
        self.n_samples = len(self.x)

    def start(self, seed: int) -> tuple[Numbers, Numbers]:
        return self.network.first_parameters(seed), self.network.first_statistics()

    def trained(
        self, state: tuple[Numbers, Numbers], orders: Sequence[Numbers], factor: float
    ) -> tuple[Numbers, Numbers]:
        parameters, statistics = state
        n_steps = -(-max(map(len, orders)) // self.batch_size)
        for batches in zip(*(np.array_split(order, n_steps) for order in orders), strict=True):
            starts = np.cumsum([0, *map(len, batches[:-1])])
            rows = np.concatenate(batches)
            _, gradient, seen = self.network.gradient(parameters, self.x[rows], self.y[rows], starts)
            parameters = parameters - self.step * factor * gradient
            statistics = (1 - MOMENTUM) * statistics + MOMENTUM * seen.mean(axis=0)
        return parameters, statistics

    def loss(self, state: tuple[Numbers, Numbers]) -> float:
        x, y = self.held_out
        return float(cross_entropy(self.network.scores(*state, x), y).mean())

    def row_losses(self, state: tuple[Numbers, Numbers]) -> Numbers:
        return cross_entropy(self.network.scores(*state, self.x), self.y)

    def gradients(self, state: tuple[Numbers, Numbers], rows: Numbers) -> Numbers:
        batches = np.array_split(rows, len(rows) // self.batch_size)
        return np.array([self.network.gradient(state[0], self.x[batch], self.y[batch])[1] for batch in batches])


def regression() -> Model:
    """Keys in the stored order, and noise."""
    arrays = {name: array.compute().astype(float) for name, array in keyed_regression(2000, noise=0.3).items()}
    return Regression(arrays["x"], arrays["y"], None, 0.3, n_workers=8, n_epochs=24)


def rare_keys() -> Model:
    """Five samples of each key, in the order of the keys."""
    arrays = {name: array.compute().astype(float) for name, array in rare_keys_regression(3000, 600, noise=0.1).items()}
    x, y = arrays["x"], arrays["y"]
    test = np.random.default_rng(0).random(len(x)) < 0.1
    step = 1 / np.linalg.norm(x, axis=1).max() ** 2
    return Regression(x[~test], y[~test], (x[test], y[test]), step, n_workers=4, n_epochs=16)


def digits() -> tuple[Numbers, Numbers, tuple[Numbers, Numbers]]:
    """Handwritten digits in the order of their classes, and others that are held out."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order] / 16, y[order]
    x -= x[:TRAINED_DIGITS].mean(axis=0)
    by_class = np.argsort(y[:TRAINED_DIGITS], kind="stable")
    return x[by_class], y[by_class], (x[TRAINED_DIGITS:], y[TRAINED_DIGITS:])


def softmax() -> Model:
    """Digits, with a constant feature."""
    x, y, (test_x, test_y) = digits()
    x, test_x = (np.column_stack([rows, np.ones(len(rows))]) for rows in (x, test_x))
    return Softmax(x, y, (test_x, test_y), 0.1, n_workers=8, n_epochs=24)


def batch_norm() -> Model:
    """Digits, with a hidden layer and batch norm."""
    network = Network((64, 64, 10), batch_norm=True)
    return Perceptron(network, *digits(), step=0.3, batch_size=8, n_workers=16, n_epochs=24)


MODELS: dict[str, Callable[[], Model]] = {
    "regression": regression,
    "softmax": softmax,
    "rare-keys": rare_keys,
    "batch-norm": batch_norm,
}


def variance_ratio(values: Sequence[Numbers]) -> float:
    """F of an analysis of variance: that between workers over that within them, summed over columns."""
    columns = [np.reshape(value, (len(value), -1)) for value in values]
    every = np.concatenate(columns)
    mean = every.mean(axis=0)
    between = sum(len(value) * ((value.mean(axis=0) - mean) ** 2).sum() for value in columns) / (len(values) - 1)
    within = sum(((value - value.mean(axis=0)) ** 2).sum() for value in columns) / (len(every) - len(values))
    return float(between / max(within, 1e-300))


@dataclass
class Rule:
    """Chooses Q after each epoch but the last one."""

    name: str
    model: Model
    _loss: float = math.inf
    _plateau: float = LEAST_Q / 2

    def fraction(self, state: Any, held: Sequence[Numbers], epoch: int) -> float:
        """Q of the exchange before this epoch."""
        most = (self.model.n_workers - 1) / self.model.n_workers
        if self.name == "plateau":
            loss = float(self.model.row_losses(state).mean())
            self._plateau = self._plateau * 2 if loss > 0.95 * self._loss else self._plateau / 2
            self._plateau, self._loss = min(most, max(LEAST_Q, self._plateau)), loss
            return self._plateau
        return LEAST_Q + (most - LEAST_Q) * self._part(state, held, epoch)

    def _part(self, state: Any, held: Sequence[Numbers], epoch: int) -> float:
        if self.name == "falling":
            return float(0.5 ** (epoch - 1))
        if self.name == "rising":
            return float(0.5 ** (self.model.n_epochs - 1 - epoch))
        if self.name == "loss":
            losses = self.model.row_losses(state)
            ratio = variance_ratio([losses[rows] for rows in held])
        else:
            ratio = variance_ratio([self.model.gradients(state, rows) for rows in held])
        return max(0.0, 1 - 1 / max(ratio, 1e-9))


RULES = ("loss", "gradients", "plateau", "falling", "rising")


def run(model: Model, sharding: str, decays: bool, seed: int, counts: Sequence[int] | Rule) -> tuple[float, list[int]]:
    """The last loss, and how many samples each worker sends in each exchange: those given, or those of a rule."""
    n = model.n_workers
    order, offsets = group_by(first_ranks(sharding, model.n_samples, n, seed=seed), n)
    rows, sizes = np.asarray(order), np.diff(offsets)
    share = int(sizes.min())
    state, sent = model.start(seed), []
    for epoch in range(model.n_epochs):
        if epoch:
            if isinstance(counts, Rule):
                fraction = counts.fraction(state, np.split(rows, offsets[1:-1]), epoch)
                sent.append(min(share, math.ceil(fraction * share)))
            else:
                sent.append(counts[epoch - 1])
            if sent[-1]:
                rows = SlotExchange.drawn(sizes, sent[-1], False, *path_of(seed, epoch)).applied(rows)
        held = np.split(rows, offsets[1:-1])
        orders = [part[epoch_permutation(part, seed=seed, epoch=epoch, rank=rank)] for rank, part in enumerate(held)]
        factor = 1 - 0.95 * epoch / (model.n_epochs - 1) if decays else 1.0
        state = model.trained(state, orders, factor)
    return model.loss(state), sent


def evenly(total: int, n_exchanges: int) -> list[int]:
    """As many samples in as many exchanges, each with the same number to within one."""
    return np.diff(np.arange(n_exchanges + 1) * total // n_exchanges).tolist()


def difference(losses: Sequence[float], constant: Sequence[float]) -> str:
    """Mean difference of pairs relative to the mean loss with a constant Q, and its 95 % interval."""
    differences = (np.array(losses) - np.array(constant)) / np.mean(constant)
    mean, n = differences.mean(), len(differences)
    half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n)
    return f"{mean:+.1%} [{mean - half:+.1%}, {mean + half:+.1%}]"


@click.command()
@click.option("--model", "names", type=click.Choice(list(MODELS)), multiple=True, default=list(MODELS))
@click.option("--rule", "rules", type=click.Choice(RULES), multiple=True, default=RULES)
@click.option("--pairs", type=click.IntRange(2), default=20, show_default=True)
def main(names: tuple[str, ...], rules: tuple[str, ...], pairs: int) -> None:
    """Compare each rule with a constant Q."""
    for name in names:
        model = MODELS[name]()
        n_exchanges, share = model.n_epochs - 1, model.n_samples / model.n_workers
        for sharding, decays, rule in itertools.product(("random", "contiguous"), (False, True), rules):
            losses, constant, constant_from_random, totals = [], [], [], []
            for seed in range(pairs):
                loss, sent = run(model, sharding, decays, seed, Rule(rule, model))
                counts = evenly(sum(sent), n_exchanges)
                losses.append(loss)
                constant.append(run(model, sharding, decays, seed, counts)[0])
                if sharding != "random":
                    constant_from_random.append(run(model, "random", decays, seed, counts)[0])
                totals.append(sum(sent) / share / n_exchanges)
            steps = "decaying" if decays else "constant"
            shards = f", from random shards {difference(losses, constant_from_random)}" if constant_from_random else ""
            print(
                f"{name}, {steps} steps, {sharding} shards, {rule}: mean Q {np.mean(totals):.3f}, loss "
                f"{np.mean(losses):.4g}; against a constant Q {difference(losses, constant)}{shards}",
                flush=True,
            )


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
