"""Break down the time of synchronous SGD as a larger fraction of the samples is exchanged.

    python pipelines/synchronous_sgd.py /mnt/shared/images.zarr --classes 10 [--torch] [--scheduler ADDRESS]

The dataset must have features `x` and integer labels `y`; real_data.py writes one of MNIST's digits. The same network,
with batch norm, is trained with local shuffling, with partial exchange of a growing fraction Q, and with global
shuffles that fetch samples from peers or from storage. The table shows the fraction of wrong labels on held-out
samples, beside that of the most frequent label, and mean seconds of an epoch:

    I/O               waiting for storage
    EXCHANGE          waiting for samples from other workers
    FW+BW             gathering mini-batches, forward and backward passes
    GE+WU             waiting for the averages of gradients
    hidden exchange   exchange that overlaps with training and costs only processor time

With --torch the network is a PyTorch network. Without it, the network uses NumPy and one worker averages the gradients.

References
----------
Nguyen et al. (2022), Figure 10; see docs/papers.md.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import click
from distributed import Client
from rich import box
from rich.console import Console
from rich.table import Table

import dshuffle
from dshuffle.compare import connect
from dshuffle.training import History, Network, TrainedNetwork, accuracy_on, fit_synchronous_sgd
from dshuffle.units import human_seconds

WAYS = (
    ("local", "peer"),
    ("partial:0.1", "peer"),
    ("partial:0.3", "peer"),
    ("partial:0.7", "peer"),
    ("global", "peer"),
    ("global", "storage"),
)


def train(
    client: Client,
    dataset: dshuffle.Dataset,
    way: tuple[str, str],
    sizes: tuple[int, ...],
    epochs: int,
    batch_size: int,
    step: float,
    torch: bool,
) -> tuple[History[Any], list[dshuffle.EpochRecord]]:
    assignment, delivery = way
    options: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
    with dshuffle.Shuffler(
        client, dataset, assignment=assignment, delivery=delivery, sharding="contiguous"
    ) as shuffler:
        if not torch:
            return fit_synchronous_sgd(shuffler, Network(sizes), step=step, **options), shuffler.records
        from dshuffle.training.torch_ddp import fit_torch_ddp  # an optional extra

        def make_model() -> Any:
            from torch import nn

            class Floats(nn.Module):  # type: ignore[misc]
                def forward(self, rows: Any) -> Any:
                    return rows.float()

            layers: list[Any] = [Floats()]
            for size, units in itertools.pairwise(sizes[:-1]):
                layers += [nn.Linear(size, units), nn.BatchNorm1d(units), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))

        def make_optimizer(parameters: Any) -> Any:
            from torch import optim

            return optim.SGD(parameters, lr=step)

        return fit_torch_ddp(shuffler, make_model, make_optimizer, **options), shuffler.records


def phases_of(record: dshuffle.EpochRecord) -> list[float]:
    """Return the seconds of I/O, EXCHANGE, FW+BW, GE+WU and of the hidden exchange in an epoch, means over ranks."""
    own = statistics.fmean(record.rank_training_seconds)
    stored, moved = (record.waited_seconds, 0.0) if record.reads_store else (0.0, record.waited_seconds)
    return [stored, moved, own, record.training_seconds - own, record.exchange_seconds - record.waited_seconds]


def predict(model: Any, rows: Any) -> Any:
    """Return the most likely label of each row."""
    if isinstance(model, TrainedNetwork):
        return model.predict(rows)
    from torch import from_numpy, no_grad

    with no_grad():
        return model(from_numpy(rows)).argmax(dim=1).numpy()


@click.command()
@click.argument("url")
@click.option("--classes", required=True, type=int, help="Number of classes.")
@click.option("--scheduler", metavar="ADDRESS", help="Address of a running Dask scheduler, instead of a local cluster.")
@click.option("--workers", default=4, show_default=True, help="Number of workers of the local cluster.")
@click.option("--epochs", default=5, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Batch size of each worker.")
@click.option("--step", default=0.1, show_default=True)
@click.option("--hidden", default=(64,), show_default=True, multiple=True, help="Units of each hidden layer.")
@click.option("--held-out", default=0.1, show_default=True, help="Fraction of the samples to measure the error on.")
@click.option("--torch/--numpy", default=False, show_default=True)
def main(
    url: str,
    classes: int,
    scheduler: str | None,
    workers: int,
    epochs: int,
    batch_size: int,
    step: float,
    hidden: tuple[int, ...],
    held_out: float,
    torch: bool,
) -> None:
    """Train on the arrays x and y of the dataset at URL, starting from contiguous shards."""
    dataset, test = dshuffle.open_dataset(url).split(1 - held_out)
    measure = accuracy_on(test, predict)
    sizes = (*dataset.arrays["x"].shape, *hidden, classes)
    headings = ("way", "error", "of majority", "epoch", "I/O", "EXCHANGE", "FW+BW", "GE+WU", "hidden exchange")
    table = Table(*headings, title="Mean seconds per epoch, without the first epoch", box=box.SIMPLE_HEAD)
    console = Console(width=120)
    with connect(scheduler, workers) as client, console.status("starting") as status:
        for way in WAYS:
            status.update(" + ".join(way))
            history, records = train(client, dataset, way, sizes, epochs, batch_size, step, torch)
            later = records[1:] or records
            phases = [phases_of(record) for record in later]
            means = [statistics.fmean(phase) for phase in zip(*phases, strict=True)]
            ends = [0.0, *(point.seconds for point in history.points)][-len(later) - 1 :]
            seconds = [(ends[-1] - ends[0]) / len(later), *means]
            accuracy = measure(history.model)  # after the fit, so that no epoch takes longer for it
            errors = (1 - accuracy[name] for name in ("accuracy", "accuracy_of_majority"))
            table.add_row(" + ".join(way), *map("{:.3f}".format, errors), *map(human_seconds, seconds))
    console.print(table)


if __name__ == "__main__":
    main()
