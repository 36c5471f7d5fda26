"""Compare error against epochs and against time for every policy and delivery, over several seeds.

    python pipelines/convergence_study.py [--seeds 5] [--study sorted] [--output convergence-study] [--quick]
    python pipelines/convergence_study.py --scheduler ADDRESS --data s3://bucket/study --samples 400000

The studies are regression by parallel SGD on sorted and on i.i.d. rows, and matrix completion with and without noise.
In the matrix, shares are whole rows, so no exchange splits a row. The policies are:

    none              stored order, contiguous shares, no randomness
    local             the same shares, shuffled within each worker every epoch
    once              one random assignment, then as local
    partial, global   samples move before every epoch
    columns           matrix only: rows stay, and the columns are permuted

Without --scheduler, workers are logical: threads of one process with no network between them. They compute the same
errors as separate workers, but the seconds are those of this machine. The script checks that every delivery gives the
same errors. Tables show the gain over `none` and over `once` for each seed. A gain is marked null if its range over the
seeds includes 1. The script writes convergence.csv and convergence.html. It takes half an hour on two cores. --quick
takes ten seconds and only checks that the script runs.

References
----------
Chung et al. (2017), Figure 8; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from bokeh.plotting import figure
from distributed import Client
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from studies.scripts import at_least, chart_page
from studies.stored_order import StoredOrder

import dshuffle
from dshuffle.compare import compile_kernels, connect, count_training_workers, local_cluster
from dshuffle.planning import first_ranks
from dshuffle.synthetic import keyed_regression
from dshuffle.training import Decay, EarlyStopping, History, fit_linear_regression, fit_matrix_completion
from dshuffle.units import human_seconds

DELIVERIES = ("peer", "server", "storage", "clique", "ubershuffle")
CODED_CACHE = 0.2  # cache fraction of the last two deliveries, as in Chung et al. (2017)
DECAY = 0.9  # of the step of the matrix completion after each epoch, as in Chung et al. (2017), section 5.1
# Okabe and Ito's palette for colour-blind readers: policies, then deliveries.
COLOURS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#CC79A7", "#009E73")
WAY_COLOURS = ("#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8A8F98")
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")


@dataclass(frozen=True, slots=True)
class Policy:
    """Samples that a worker trains on, and their order; for ``columns`` see ``fit_matrix_completion``."""

    label: str
    assignment: str
    sharding: str = "contiguous"
    as_stored: bool = False
    columns: str = "every epoch"

    @property
    def moves(self) -> bool:
        """Whether samples move between epochs, which makes the delivery matter."""
        return self.assignment != "local"


REGRESSION = (
    Policy("none", "local", as_stored=True),
    Policy("local", "local"),
    Policy("once", "local", "random"),
    Policy("partial 0.1", "partial:0.1"),
    Policy("partial 0.3", "partial:0.3"),
    Policy("global", "global", "random"),
)
MATRIX = (
    Policy("none", "local", as_stored=True, columns="never"),
    Policy("local", "local", columns="never"),
    Policy("once", "local", "random", columns="once"),
    Policy("columns", "local"),
    Policy("global", "chunks", "random"),
)


@dataclass(frozen=True, slots=True)
class Study:
    """A problem, with functions that make its data from a seed and fit it.

    Runs are compared by the epochs to ``target``, or by their last error if it is None. Groups of ``unit`` samples, as
    the entries of a matrix row, stay on one worker. ``deliveries`` says whether all deliveries are compared.
    """

    name: str
    title: str
    policies: tuple[Policy, ...]
    workers: int
    epochs: int
    target: float | None
    make: Callable[[int], tuple[dict[str, Any], Any]]
    fit: Callable[..., History[Any]]
    unit: int = 1
    deliveries: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """Errors and elapsed seconds of one fit by epoch, and median seconds of its exchanges and waits."""

    errors: tuple[float, ...]
    seconds: tuple[float, ...]
    exchange: float
    waited: float


Runs = dict[tuple[str, str], list[Run]]  # by policy and delivery, one run for each seed


class Below(EarlyStopping):
    """Stop when the error is below a value."""

    def is_due(self, points: Sequence[Any]) -> bool:
        """Whether the last error is below the value."""
        return error_of(points[-1]) < self.least_change


def error_of(point: Any) -> float:
    """Return the error on unseen entries if it is known, else the training error."""
    return float(point.validation.get("test_error", point.error))


def rows(samples: int, by_key: bool, seed: int) -> tuple[dict[str, Any], None]:
    """Make rows sorted by a key, or rows of 200 independent normal numbers as in the paper; mean squared norm 1."""
    if by_key:
        return keyed_regression(samples, seed=seed), None
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, 200), np.float32) / np.float32(math.sqrt(200))
    return {"x": x, "y": x @ rng.standard_normal(200, np.float32)}, None


def low_rank_entries(
    n_rows: int, n_columns: int, per_row: int, rank: int, noise: float = 0.0, seed: int = 0
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Some entries of each row of a matrix of low rank and variance 1, sorted by row and column; and the matrix."""
    left = np.random.default_rng([seed, 1, 0]).standard_normal((n_rows, rank), np.float32)
    right = np.random.default_rng([seed, 0]).standard_normal((n_columns, rank), np.float32)
    right /= np.float32(np.sqrt(rank))
    rng = np.random.default_rng([seed, 2, 0])
    order, columns = list(range(n_columns)), np.empty((n_rows, per_row), np.int32)
    for row, chances in enumerate(rng.random((n_rows, per_row)).tolist()):
        # The first steps of a Fisher-Yates shuffle. Any initial order will do: each row continues with the last one's.
        for k, chance in enumerate(chances):
            other = k + int(chance * (n_columns - k))
            order[k], order[other] = order[other], order[k]
        columns[row] = sorted(order[:per_row])
    values = np.zeros(columns.shape, np.float32)
    for k in range(rank):
        values += left[:, k, np.newaxis] * right[columns, k]
    if noise:
        values += np.float32(noise) * rng.standard_normal(values.shape, np.float32)
    rows = np.repeat(np.arange(n_rows, dtype=np.int32), per_row)
    return {"row": rows, "column": columns.ravel(), "value": values.ravel()}, left @ right.T


def entries(size: int, per_row: int, noise: float, seed: int) -> tuple[dict[str, Any], Any]:
    """Make a square matrix of rank 5 and variance 1; the test set has all unseen entries, without noise."""
    data, matrix = low_rank_entries(size, size, per_row, 5, noise, seed)
    unseen = np.ones((size, size), bool)
    unseen[data["row"], data["column"]] = False
    return data, (*np.nonzero(unseen), matrix[unseen])


def fit_rows(shuffler: Any, policy: Policy, seed: int, test: Any, **options: Any) -> History[Any]:
    return fit_linear_regression(shuffler, step=1.0, **options)


def fit_entries(size: int, step: float, shuffler: Any, policy: Policy, seed: int, test: Any, **more: Any) -> Any:
    more |= {"n_rows": size, "n_columns": size, "rank": 5, "seed": seed, "permute_columns": policy.columns}
    return fit_matrix_completion(shuffler, step=step, test=test, schedule=Decay(DECAY), **more)


def studies(options: argparse.Namespace, n_workers: int) -> list[Study]:
    """List the studies, with settings that show the effects; quick settings only check that the script runs."""
    quick = options.quick
    n, few = (n_workers, n_workers) if n_workers else (4, 2) if quick else (20, 10)
    size, per_row = (60, 20) if quick else (500, 60)
    size = -(-size // few) * few  # the same number of matrix rows on every worker
    far, short = (8, 3) if quick else (250, 30)
    by_key, iid_rows = partial(rows, options.samples, True), partial(rows, options.samples, False)
    by = Study("sorted", "Regression, rows sorted by a key", REGRESSION, n, far, 1e-2, by_key, fit_rows)
    made = [by, Study("iid", "Regression, i.i.d. rows", REGRESSION, n, far, 1e-2, iid_rows, fit_rows)]
    if not (quick or n_workers):
        ends = tuple(policy for policy in REGRESSION if policy.label in ("none", "once", "global"))
        made += [replace(by, name=f"sorted-{k}", policies=ends, workers=k, deliveries=False) for k in (5, 40)]
    noisy, clean = partial(entries, size, per_row, 1.0), partial(entries, size, per_row, 0.0)
    fits = partial(fit_entries, size, 0.15), partial(fit_entries, size, 0.1)
    made += [
        Study("matrix", "Matrix, noise 1, first step 0.15", MATRIX, few, short, None, noisy, fits[0], per_row),
        Study("clean", "Matrix, no noise, first step 0.1", MATRIX, few, short, 1e-2, clean, fits[1], per_row, False),
    ]
    return [study for study in made if not options.studies or study.name in options.studies]


def run(client: Client, study: Study, dataset: Any, test: Any, policy: Policy, delivery: str, seed: int) -> Run:
    """Run one fit."""
    assignment, sharding = policy.assignment, cast(Any, policy.sharding)
    if assignment == "chunks":
        assignment = f"chunks:{study.unit}"
    elif study.unit > 1:
        sharding = first_ranks(sharding, dataset.n_samples, study.workers, seed=seed, chunk_rows=study.unit)
    cached: dict[str, Any] = {"delivery": delivery, "seed": seed}
    if delivery in DELIVERIES[3:]:
        cached["cache_fraction"] = max(CODED_CACHE, 1 / study.workers)
    with dshuffle.Shuffler(client, dataset, assignment=assignment, sharding=sharding, **cached) as shuffler:
        beyond = 3 if study.deliveries else 1  # so that the plot shows more than the target
        stopping = None if study.target is None else Below(least_change=study.target / beyond)
        trained = StoredOrder(shuffler) if policy.as_stored else shuffler
        history = study.fit(trained, policy, seed, test, epochs=study.epochs, early_stopping=stopping)
    later = shuffler.records[1:] or shuffler.records
    exchange, waited = zip(*[(record.exchange_seconds, record.waited_seconds) for record in later], strict=True)
    errors, seconds = zip(*[(error_of(point), point.seconds) for point in history.points], strict=True)
    return Run(errors, seconds, statistics.median(exchange), statistics.median(waited))


def run_all(client: Client, study: Study, options: argparse.Namespace, console: Console) -> Iterator[Runs]:
    """Run every policy with every delivery. Seeds are the outer loop, so that load on the machine affects all alike."""
    runs: Runs = {}
    with console.status(study.title) as status:
        for seed in range(options.seeds):
            data, test = study.make(seed)
            where, chunk = f"{options.data}/{study.name}-{seed}.zarr", 10 * study.unit if study.unit > 1 else 200
            dshuffle.create_dataset(where, data, chunk_rows=chunk, overwrite=True)
            dataset = dshuffle.open_dataset(where, storage_options={"timeout": 900})  # for a loaded machine
            for policy in study.policies:
                compared = policy.moves and study.deliveries and seed < options.timed_seeds
                for delivery in options.deliveries if compared else ["peer"]:
                    status.update(f"{study.title}, {study.workers} workers, seed {seed}: {policy.label}, {delivery}")
                    if not runs:  # the first run imports and compiles
                        run(client, replace(study, epochs=2), dataset, test, policy, delivery, seed)
                    done = run(client, study, dataset, test, policy, delivery, seed)
                    runs.setdefault((policy.label, delivery if policy.moves else "-"), []).append(done)
                    same = of(runs, policy.label)[seed].errors
                    if len(same) != len(done.errors) or not np.allclose(same, done.errors, rtol=1e-6, atol=0):
                        raise SystemExit(f"{policy.label}: the errors with {delivery} differ from those with peer")
            yield runs


def of(runs: Runs, label: str) -> list[Run]:
    """Return the runs of a policy with its first delivery."""
    return next(mine for (name, _), mine in runs.items() if name == label)


def timed(runs: Runs) -> Runs:
    """Keep the seeds that ran with all deliveries; the load of the machine may have been different for the others."""
    return {key: mine[: min(map(len, runs.values()))] for key, mine in runs.items()}


def epochs_needed(study: Study, run: Run) -> float:
    """Return the epochs until the error is below the target, or infinity; without a target, all epochs."""
    if study.target is None:
        return len(run.errors)
    return next((number for number, error in enumerate(run.errors, 1) if error < study.target), math.inf)


def judged(study: Study, runs: list[Run]) -> list[float]:
    """Return the score of each seed, where less is better: the epochs to the target, or the last error."""
    return [epochs_needed(study, run) if study.target else run.errors[-1] for run in runs]


def spread(values: Sequence[float]) -> str:
    """Format mean, minimum and maximum."""
    if math.inf in values:
        return "not reached"
    return f"{statistics.fmean(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def gain(study: Study, runs: Runs, policy: Policy, over: str) -> str:
    """Format how many times better a policy is than another, over the seeds."""
    mine, others = judged(study, of(runs, policy.label)), judged(study, of(runs, over))
    if policy.label == over or math.inf in mine:
        return ""
    ratios = [min(other, study.epochs) / one for one, other in zip(mine, others, strict=True)]
    if math.inf in others:
        return f"> {spread(ratios)}"
    return spread(ratios) + (" null" if min(ratios) <= 1 <= max(ratios) else "")


def show(study: Study, runs: Runs, console: Console) -> None:
    """Print the table of errors, then the table of seconds."""
    console.print(f"\n{study.title}, {study.workers} workers", highlight=False)
    what = f"epochs to {study.target:g}" if study.target else f"error after {study.epochs} epochs"
    table = Table("policy", what, "gain over none", "gain over once", box=box.SIMPLE_HEAD)
    for policy in study.policies:
        gains = [gain(study, runs, policy, over) for over in ("none", "once")]
        table.add_row(policy.label, spread(judged(study, of(runs, policy.label))), *gains)
    console.print(table)
    if not study.deliveries:
        return
    whole = f"seconds to {study.target:g}" if study.target else "total seconds"
    table = Table("policy", "delivery", whole, "per epoch", "exchange", "waited", box=box.SIMPLE_HEAD)
    for (label, delivery), mine in timed(runs).items():
        needed = [epochs_needed(study, run) for run in mine]
        to_target = [
            math.inf if n == math.inf else run.seconds[int(n) - 1] for n, run in zip(needed, mine, strict=True)
        ]
        columns = [[run.seconds[-1] / len(run.seconds) for run in mine]]
        columns += [[run.exchange for run in mine], [run.waited for run in mine]] if delivery != "-" else []
        table.add_row(label, delivery, spread(to_target), *(human_seconds(statistics.median(c)) for c in columns))
    console.print(table)


def draw(study: Study, runs: Runs) -> list[Any]:
    """Plot error against epochs, and error against seconds for each policy that moves samples."""
    colours = {policy.label: colour for policy, colour in zip(study.policies, COLOURS, strict=False)}
    panels = [panel(study, "epochs", [(label, of(runs, label), colour, "solid") for label, colour in colours.items()])]
    runs = timed(runs)
    resting = [(label, of(runs, label), colours[label], "solid") for label in ("none", "once")]
    for moved in [policy.label for policy in study.policies if policy.moves and study.deliveries]:
        ways = [(delivery, mine) for (label, delivery), mine in runs.items() if label == moved]
        looks = zip(ways, WAY_COLOURS, DASHES, strict=False)
        drawn = [(f"{moved}, {delivery}", mine, colour, dash) for (delivery, mine), colour, dash in looks]
        panels.append(panel(study, "seconds", [*resting, *drawn]))
    return panels


def panel(study: Study, x: str, lines: list[tuple[str, list[Run], str, str]]) -> Any:
    """Plot the median error over the seeds with a band from minimum to maximum; seconds are medians."""
    plot = figure(x_axis_label=x, y_axis_label="error", x_axis_type="log", y_axis_type="log", height=460)
    for label, runs, colour, dash in lines:
        length = min(len(run.errors) for run in runs)
        errors = np.array([run.errors[:length] for run in runs])
        seconds = np.median([run.seconds[:length] for run in runs], axis=0)
        across = np.arange(1.0, length + 1) if x == "epochs" else seconds
        plot.varea(across, errors.min(0), errors.max(0), color=colour, alpha=0.15)
        plot.line(across, np.median(errors, 0), color=colour, line_dash=dash, line_width=2, legend_label=label)
    if study.target is None:  # only the last errors differ enough to see
        last = [error for _, runs, _, _ in lines for error in judged(study, runs)]
        plot.y_range.update(start=0.97 * min(last), end=1.2 * max(last))
    plot.add_layout(plot.legend[0], "below")
    plot.legend.ncols, plot.legend.label_text_font_size = 2, "11px"
    return plot


def write(folder: Path, found: list[tuple[Study, Runs]], title: str) -> None:
    """Write all points as CSV, and the plots as HTML."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "convergence.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["study", "workers", "policy", "delivery", "seed", "epoch", "error", "seconds"])
        for study, runs in found:
            for (label, delivery), mine in runs.items():
                for seed, run in enumerate(mine):
                    for epoch, (error, seconds) in enumerate(zip(run.errors, run.seconds, strict=True), 1):
                        how = (study.name, study.workers, label, delivery, seed)
                        writer.writerow([*how, epoch, f"{error:.6g}", f"{seconds:.3f}"])
    sections = [(f"{study.title}, {study.workers} workers", draw(study, runs)) for study, runs in found]
    (folder / "convergence.html").write_text(chart_page("Convergence", title, sections), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", help="address of a Dask scheduler (default: logical workers)")
    parser.add_argument("--data", help="folder or URL for the datasets; all workers must see it (default: temporary)")
    parser.add_argument("--study", dest="studies", action="append", help="sorted, iid, matrix, ... (default: all)")
    parser.add_argument("--seeds", type=at_least(1), help="default: 5")
    parser.add_argument("--timed-seeds", type=int, default=2, help="seeds that run with all deliveries")
    parser.add_argument("--samples", type=at_least(1), help="samples of the regressions; default: 4000")
    parser.add_argument("--quick", action="store_true", help="small settings, to check that the script runs")
    parser.add_argument("--output", type=Path, default=Path("convergence-study"))
    options = parser.parse_args()
    if options.scheduler and not options.data:
        parser.error("--scheduler needs --data: a folder or URL that all workers see")
    options.seeds = options.seeds or (2 if options.quick else 5)
    options.samples = options.samples or (600 if options.quick else 4000)
    options.deliveries = DELIVERIES[::3] if options.quick else DELIVERIES
    console = Console()
    console.width = max(console.width, 110)
    found: list[tuple[Study, Runs]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options.data = options.data or folder
        client = stack.enter_context(connect(options.scheduler, 1)) if options.scheduler else None
        kind = f"workers of {options.scheduler}"
        if client is None:
            kind = f"logical workers: threads of one process on {os.cpu_count()} cores, with no network between them"
            logging.getLogger("dshuffle").setLevel(logging.ERROR)  # threads that share a core differ in speed
        title = f"{options.seeds} seeds; {kind}. Brackets and bands show minimum and maximum over the seeds."
        console.print(title, highlight=False)
        compile_kernels()
        n_workers = count_training_workers(client) if client else 0
        for study in studies(options, n_workers):
            with ExitStack() as own:
                here = client or own.enter_context(local_cluster(study.workers, processes=False))
                for runs in run_all(here, study, options, console):
                    write(options.output, [*found, (study, runs)], title)
            found.append((study, runs))
            show(study, runs, console)
    console.print(f"wrote {options.output}/convergence.csv and convergence.html", highlight=False)


if __name__ == "__main__":
    main()
