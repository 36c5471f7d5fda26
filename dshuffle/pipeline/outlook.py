"""What can be said of a comparison before anything runs: the shards of the stored order, batch norm, and the steps."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.compare import Way
from dshuffle.compare.neighbours import NeighbourPairs, standardised
from dshuffle.pipeline.training import Training
from dshuffle.store import Dataset
from dshuffle.training import CONSTANT, Decay, Network

logger = logging.getLogger(__name__)

FEWEST_ROWS = 16
"""Least number of rows that are read of a shard. With more workers, larger parts of the dataset are looked at."""

PERMUTATIONS = 20
"""Random shards that are drawn for comparison."""

DEVIATIONS = 3.0
"""By how many standard deviations the means of shards must vary more than those of random shards."""

FEWER_CLASSES = 0.9
"""Shards have fewer classes than random ones if they have less than this fraction of them."""

LARGEST_RATIO = 1_000_000
"""Larger ratios of variances are not told apart."""

SMALL_BATCH = 16
"""Smaller mini-batches of a worker raise the error of batch norm (Wu and He, 2018, Figure 1)."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one read of a dataset, the training and the ways say before anything runs.

    Parameters
    ----------
    stored_at_random
        Whether the dataset seems to be stored in random order.
    sentences
        The sentences, for the terminal and the report.
    warning
        The one of them that is a warning, if any.

    References
    ----------
    Wu and He (2018), on batch norm with small mini-batches; see docs/papers.md.

    Examples
    --------
    >>> from dshuffle import Choices, create_dataset
    >>> arrays = {"x": np.ones((1000, 2)), "y": np.arange(1000) // 100}
    >>> dataset = create_dataset("memory://doc-outlook", arrays, overwrite=True)
    >>> way = Way("local", Choices("local", sharding="contiguous"))
    >>> outlook = Outlook.of(dataset, Training("linear_regression", step=0.1), [way], n_workers=5)
    >>> outlook.sentences[0].split(".")[0]
    'A shard of the stored order has 2 of 10 classes of y; a random one has 10'
    >>> outlook.sentences[1]
    'The step is 0.1 in all 5 epochs.'
    """

    stored_at_random: bool
    sentences: tuple[str, ...]
    warning: str = ""

    def tell(self) -> None:
        """Log the sentences."""
        for sentence in self.sentences:
            logger.log(logging.WARNING if sentence == self.warning else logging.INFO, "dshuffle: %s", sentence)

    @classmethod
    def of(cls, dataset: Dataset, training: Training, ways: Iterable[Way], n_workers: int) -> Self:
        """Read at most 1,000 rows of the dataset, and look at the training."""
        pairs = NeighbourPairs.of(dataset, _trained_arrays(training))
        labels = _labels(pairs, training.arrays.get("target"))
        classes = None if labels is None else _Classes.of(*labels, pairs, n_workers)
        starts_as_stored = any(
            str(way.choices.sharding) == "contiguous" and not way.choices.assignment.redraws_all for way in ways
        )
        warning = _batch_norm(training, dataset.n_samples, n_workers, classes if starts_as_stored else None)
        stored = _stored_order(pairs, classes, n_workers) if starts_as_stored and n_workers > 1 else ""
        return cls(pairs.look_random, tuple(filter(None, (stored, warning, _steps(training)))), warning)


@dataclass(frozen=True, slots=True)
class _Classes:
    """Mean number of classes among the rows that were read of a shard of the stored order, and of a random one.

    ``n_parts`` is the number of consecutive parts of the dataset in place of shards, if workers are too many for those.
    """

    name: str
    total: int
    stored: float
    random: float
    n_parts: int | None

    @classmethod
    def of(cls, name: str, labels: NDArray[Any], pairs: NeighbourPairs, n_workers: int) -> Self:
        codes = np.unique(labels, return_inverse=True)[1]
        shards = _shards(pairs, n_workers)
        rng = np.random.default_rng(0)
        random = [_mean_classes(codes, rng.permutation(shards)) for _ in range(PERMUTATIONS)]
        stored = _mean_classes(codes, shards)
        return cls(name, int(codes.max()) + 1, stored, float(np.mean(random)), _n_parts(pairs, n_workers))

    @property
    def are_few(self) -> bool:
        """Whether a shard of the stored order lacks at least half of the classes of a random one."""
        return self.stored <= self.random / 2

    @property
    def are_fewer(self) -> bool:
        """Whether a shard of the stored order has clearly fewer classes than a random one."""
        return self.stored < FEWER_CLASSES * self.random

    @property
    def text(self) -> str:
        part = "A shard" if self.n_parts is None else f"One of {self.n_parts} consecutive parts"
        return (
            f"{part} of the stored order has {self.stored:.3g} of {self.total} classes of {self.name}; a random one "
            f"has {self.random:.3g}."
        )

    @property
    def in_batch(self) -> str:
        """What a mini-batch of one worker holds of the classes."""
        if self.n_parts is None:
            return f"{self.stored:.3g} of {self.total} classes"
        return f"few of {self.total} classes"  # a shard has fewer than the parts that were looked at


def _mean_classes(codes: NDArray[np.int64], shards: NDArray[np.int64]) -> float:
    return len(np.unique(np.stack([shards, codes]), axis=1).T) / len(np.unique(shards))


def _trained_arrays(training: Training) -> Container[str] | None:
    """Names of the arrays that a trainer trains on; None if they are not known, or if they are all arrays."""
    if not training.is_trainer:
        return None
    if training.options.get("training_step") is not None:
        return training.options.get("arrays")
    return set(training.arrays.values()) or None


def _n_parts(pairs: NeighbourPairs, n_workers: int) -> int | None:
    """Number of consecutive parts to look at in place of shards, of which too few rows were read; None for shards."""
    most = max(1, len(pairs.sample_ids) // FEWEST_ROWS)
    return most if most < n_workers else None


def _shards(pairs: NeighbourPairs, n_workers: int) -> NDArray[np.int64]:
    """The shard of each row that was read, or its part, if shards are consecutive rows."""
    return pairs.sample_ids * (_n_parts(pairs, n_workers) or n_workers) // pairs.n_samples


def _labels(pairs: NeighbourPairs, target: str | None) -> tuple[str, NDArray[Any]] | None:
    """The array of labels: one integer per row with few different values. The target comes first."""
    names = sorted(pairs.arrays, key=lambda name: (name != target, name))
    for name in names:
        values = pairs.arrays[name]
        if values.ndim == 1 and values.dtype.kind in "biu" and len(np.unique(values)) <= len(values) // 10:
            return name, values
    return None


def _stored_order(pairs: NeighbourPairs, classes: _Classes | None, n_workers: int) -> str:
    """How much the shards of the stored order differ, and what that means for training on them."""
    if not pairs.arrays:
        return ""
    if pairs.look_random:
        return (
            "The dataset is stored in random order, as far as pairs of neighbouring rows show. So “local” as stored "
            "learns what it learns after one shuffle."
        )
    if classes is not None and classes.are_fewer:
        spread = classes.text
    else:
        n_parts, shards = _n_parts(pairs, n_workers), _shards(pairs, n_workers)
        means = "shards" if n_parts is None else f"{n_parts} consecutive parts"
        rng = np.random.default_rng(0)
        random = [variance_between(pairs.arrays, rng.permutation(shards)) for _ in range(PERMUTATIONS)]
        ratio = variance_between(pairs.arrays, shards)
        if ratio <= np.mean(random) + DEVIATIONS * np.std(random):
            return (
                f"Neighbouring rows are alike, but means of {means} of the stored order do not vary more than those of "
                "random ones."
            )
        spread = (
            f"Neighbouring rows are alike: means of {means} of the stored order vary {_ratio_text(ratio)} times as "
            "much as those of random ones."
        )
    return (
        f"{spread} So “local” as stored may learn less than after one shuffle, unless gradients are averaged in every "
        "step and there is no batch norm."
    )


def _ratio_text(ratio: float) -> str:
    """Two digits of a ratio, such as 1.8, 18 or 1,800. It is infinite if the rows of each shard are equal."""
    if ratio > LARGEST_RATIO:
        return f"more than {LARGEST_RATIO:,}"
    return f"{float(f'{ratio:.2g}'):,.7g}"


def variance_between(arrays: Mapping[str, NDArray[Any]], shards: NDArray[np.int64]) -> float:
    """Return the variance between the means of shards, relative to its expectation for random shards.

    Columns count equally. It is the F statistic of an analysis of variance with the sums of all columns.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> values = {"x": rng.standard_normal((1000, 50))}
    >>> 0.8 < variance_between(values, np.arange(1000) // 250) < 1.2
    True
    >>> variance_between({"x": np.arange(1000.0)}, np.arange(1000) // 250) > 100
    True
    """
    columns = np.concatenate([standardised(values) for values in arrays.values()], axis=1)
    _, codes, sizes = np.unique(shards, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), columns.shape[1]))
    np.add.at(sums, codes, columns)
    between = float((sums**2 / sizes[:, np.newaxis]).sum())
    within = float((columns**2).sum()) - between
    freedom = len(columns) - len(sizes)
    if len(sizes) < 2 or within <= 0:
        return float("inf") if within <= 0 < between else 1.0
    return between / (len(sizes) - 1) / (within / freedom)


def _batch_norm(training: Training, n_samples: int, n_workers: int, classes: _Classes | None) -> str:
    """A warning if batch norm sees few samples, or few classes."""
    batch_size = training.options.get("batch_size")
    if not isinstance(batch_size, int) or not has_batch_norm(training):
        return ""
    share = -(-n_samples // n_workers)
    rows = -(-share // max(1, -(-share // batch_size)))  # mini-batches are equal but for one sample
    doubts = [f"{rows} samples"] if rows < SMALL_BATCH else []
    if classes is not None and classes.are_few:
        doubts.append(classes.in_batch)
    if not doubts:
        return ""
    return (
        f"Warning: the model has batch norm, which sees {' and '.join(doubts)} in a mini-batch of one worker. Its "
        "statistics may not be those of the dataset: compare with larger mini-batches, or with partial:0.1."
    )


def has_batch_norm(training: Training) -> bool:
    """Whether the model of a trainer has batch norm. False if the training is a function of the user."""
    network = training.options.get("network")
    if isinstance(network, Network):
        return network.batch_norm
    torch, make_model = sys.modules.get("torch"), training.options.get("make_model")
    if torch is None or make_model is None or training.name != "fit_torch_ddp":
        return False
    kinds = torch.nn.modules.batchnorm._BatchNorm
    synchronised = torch.nn.SyncBatchNorm  # its statistics are those of all workers
    state = torch.random.get_rng_state()
    try:
        modules = list(make_model().modules())
    finally:
        torch.random.set_rng_state(state)
    return any(isinstance(module, kinds) and not isinstance(module, synchronised) for module in modules)


def _steps(training: Training) -> str:
    """The steps of the first and the last epoch of a trainer, whose ``schedule`` is known to be a :class:`Schedule`."""
    parameters = inspect.signature(training.fit).parameters
    if not training.is_trainer or "schedule" not in parameters:
        return ""
    schedule = training.options.get("schedule", parameters["schedule"].default)
    if schedule is None:  # the estimator has a schedule of its own
        return ""
    decay = training.options.get("step_decay", 1.0)
    if schedule == CONSTANT and 0 < decay < 1:  # the trainer refuses other factors
        schedule = Decay(decay)
    first, last = float(schedule(0)), float(schedule(training.epochs - 1))
    step = training.options.get("step")
    if not isinstance(step, int | float):
        if first in (last, 0):
            return ""
        return f"Steps of the last epoch are {last / first:.3g} times those of the first."
    if first == last:
        return f"The step is {step * first:.3g} in all {training.epochs} epochs."
    return f"The step is {step * first:.3g} in the first epoch, and {step * last:.3g} in the last."
