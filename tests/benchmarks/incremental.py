"""`ShuffledSGD` beside `Incremental` of dask-ml: accuracy and seconds on data in random and in sorted order.

pip install dask-ml
python tests/benchmarks/incremental.py

Both make the same number of passes over the same rows on the same workers. `Incremental` trains one model on one block
after the other, and draws the order of the blocks anew in every pass (its default). `ShuffledSGD` trains a copy on
every worker and averages once in every pass.
"""

from __future__ import annotations

import time
import warnings

import click
import dask
import dask.array
import numpy as np
from dask_ml.wrappers import Incremental
from distributed import Client, LocalCluster
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import SGDClassifier

from dshuffle import ShuffledSGD
from dshuffle.synthetic import gaussian_blobs
from dshuffle.units import human_seconds


def incremental(x, y, passes, classes):
    """Train with dask-ml, and return the model."""
    model = Incremental(SGDClassifier(random_state=0, alpha=1e-3), random_state=0, assume_equal_chunks=True)
    for _ in range(passes):
        model.partial_fit(x, y, classes=classes)
    return model.estimator_


@click.command()
@click.option("--samples", default=100_000, show_default=True)
@click.option("--features", default=100, show_default=True)
@click.option("--classes", default=10, show_default=True)
@click.option("--passes", default=5, show_default=True)
@click.option("--blocks", default=20, show_default=True)
@click.option("--workers", default=2, show_default=True)
def main(samples: int, features: int, classes: int, passes: int, blocks: int, workers: int) -> None:
    """Print a table."""
    warnings.filterwarnings("ignore", module="dask_ml")
    made = gaussian_blobs(samples, n_features=features, n_classes=classes, seed=0)
    held_out = np.random.default_rng(1).random(samples) < 0.1
    x, y = dask.compute(made["x"].astype(np.float64), made["y"])
    test, x, y = (x[held_out], y[held_out]), x[~held_out], y[~held_out]
    table = Table()
    for heading in ("order", "trained with", "error", "seconds"):
        table.add_column(heading)
    options = {
        "threads_per_worker": 1,
        "dashboard_address": None,
        "scheduler_kwargs": {"dashboard_address": "127.0.0.1:0"},
    }
    with LocalCluster(n_workers=workers, processes=True, **options) as cluster, Client(cluster) as client:
        orders = {
            "random": np.random.default_rng(2).permutation(len(y)),
            "sorted by label": np.argsort(y, kind="stable"),
        }
        for name, order in orders.items():
            block = -(-len(y) // blocks)
            rows = client.persist(dask.array.from_array(x[order], chunks=(block, features)))
            labels = client.persist(dask.array.from_array(y[order], chunks=block))
            for trainer in ("warm-up", "dask-ml Incremental", "ShuffledSGD"):
                started = time.perf_counter()
                if trainer == "dask-ml Incremental":
                    model = incremental(rows, labels, passes, np.arange(classes))
                else:
                    estimator = SGDClassifier(random_state=0, alpha=1e-3)
                    epochs = 1 if trainer == "warm-up" else passes
                    model = ShuffledSGD(estimator, epochs=epochs, batch_rows=block).fit(rows, labels)
                if trainer != "warm-up":
                    seconds = human_seconds(time.perf_counter() - started)
                    table.add_row(name, trainer, f"{1 - model.score(*test):.3f}", seconds)
    Console().print(table)


if __name__ == "__main__":
    main()
