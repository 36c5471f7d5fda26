"""What is said of a comparison before anything runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dshuffle
from dshuffle import Choices, Training
from dshuffle.compare import Way, default_ways, falling
from dshuffle.pipeline.outlook import Outlook
from dshuffle.planning import first_ranks
from dshuffle.synthetic import keyed_regression, rare_keys_regression
from dshuffle.training import Decay, Network

URL = "memory://outlook"
REGRESSION = Training("linear_regression", epochs=5, step=0.5)


def user_fit(shuffler, *, epochs, schedule="cosine"):
    """A function of the user, whose schedule is a name."""


def outlook(arrays, training=REGRESSION, n_workers=4, ways=None):
    dataset = dshuffle.create_dataset(URL, arrays, overwrite=True)
    return Outlook.of(dataset, training, ways or default_ways(), n_workers)


def test_classes_of_a_shard_are_counted_as_they_are_in_the_whole_dataset():
    """1,000 rows show each of the classes that a shard has here."""
    labels = np.sort(np.random.default_rng(0).integers(0, 12, 6000))
    ranks = first_ranks("contiguous", 6000, 5, seed=0)
    classes = np.mean([len(np.unique(labels[ranks == rank])) for rank in range(5)])
    first, _ = outlook({"x": np.ones((6000, 2)), "y": labels}, n_workers=5).sentences
    assert f"A shard of the stored order has {classes:.3g} of 12 classes of y; a random one has 12." in first
    assert "“local” as stored may learn less" in first


@pytest.mark.slow
@pytest.mark.parametrize("arrays", [keyed_regression(6000), rare_keys_regression(3000, 600)])
def test_sorted_features_are_told_from_shuffled_ones(arrays):
    first, _ = (stored := outlook(arrays)).sentences
    assert first.startswith("Neighbouring rows are alike: means of shards of the stored order vary ")
    assert float(first.split(" vary ")[1].split(" times ")[0]) > 1.2
    assert not stored.stored_at_random
    order = np.random.default_rng(0).permutation(len(arrays["x"]))
    shuffled = outlook({name: array.compute()[order] for name, array in arrays.items()})
    assert shuffled.stored_at_random
    assert shuffled.sentences[0].startswith("The dataset is stored in random order, as far as pairs of neighbouring")


@pytest.mark.parametrize("scale", [1e-170, 1e160, 1e307])
def test_the_scale_of_features_makes_no_difference(scale):
    x = np.sort(np.random.default_rng(0).standard_normal((2000, 3)), axis=0)
    assert outlook({"x": scale * x}).sentences[0] == outlook({"x": x}).sentences[0]


def test_shards_like_random_ones_are_not_warned_of():
    """Classes in turn are no random order, but each shard has all of them."""
    x = np.random.default_rng(0).standard_normal((1000, 2))
    first, _ = outlook({"x": x, "y": np.arange(1000) % 10}).sentences
    assert first == (
        "Neighbouring rows are alike, but means of shards of the stored order do not vary more than those of random "
        "ones."
    )
    slightly_fewer = np.where(np.arange(1000) < 250, np.arange(1000) % 19, np.arange(1000) % 20)
    first, _ = outlook({"x": x, "y": slightly_fewer}).sentences
    assert "classes" not in first
    assert "may learn less" not in first


def user_step(module, batch):
    """Return the loss of a mini-batch."""


def test_arrays_that_are_not_trained_on_do_not_count():
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((1000, 3)), "y": rng.standard_normal(1000), "day": np.arange(1000) // 50}
    assert outlook(arrays).stored_at_random
    assert outlook(arrays).sentences[0].startswith("The dataset is stored in random order")
    by_day = Training("linear_regression", epochs=5, step=0.5, target="day")
    assert "has 5 of 20 classes of day; a random one has 20." in outlook(arrays, by_day).sentences[0]
    assert not outlook(arrays, Training(user_fit)).stored_at_random, "the function may train on any array"


def test_arrays_of_a_training_step_count(torch):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((1000, 3)), "day": np.arange(1000) // 50}
    options = {"make_model": torch.nn.Identity, "make_optimizer": torch.optim.SGD, "batch_size": 4}
    options["training_step"] = user_step
    assert not outlook(arrays, Training("torch_ddp", **options)).stored_at_random
    assert outlook(arrays, Training("torch_ddp", **options, arrays=["x"])).stored_at_random


def test_more_workers_than_parts_are_not_said_to_have_those_parts():
    """1,000 rows are read, 16 of each part: a shard of 200 workers has 5 rows."""
    arrays = {"x": np.ones((1000, 2)), "y": np.arange(1000) // 10}
    network = Network((2, 4, 100), batch_norm=True)
    training = Training("synchronous_sgd", network=network, batch_size=5, step=0.1)
    first, warning, _ = outlook(arrays, training, n_workers=200).sentences
    parts = np.arange(1000) * 62 // 1000
    classes = np.mean([len(np.unique(arrays["y"][parts == part])) for part in range(62)])
    assert first.startswith(f"One of 62 consecutive parts of the stored order has {classes:.3g} of 100 classes of y;")
    assert "sees 5 samples and few of 100 classes" in warning
    first, _ = outlook({"x": np.arange(1000.0)[:, np.newaxis], "y": np.ones(1000)}, n_workers=200).sentences
    assert "means of 62 consecutive parts of the stored order vary " in first


@pytest.mark.parametrize(
    ("target", "times"),
    [
        (np.arange(1000.0), r"\d,\d00"),
        (np.arange(1000) // 250 / 2, "more than 1,000,000"),
    ],
)
def test_large_ratios_are_readable(target, times):
    first, _ = outlook({"x": np.ones((1000, 2)), "y": target}).sentences
    assert re.search(f" vary {times} times as much as those of random ones", first)


def test_nothing_is_said_of_a_stored_order_that_no_way_begins_with():
    ways = [Way("local", Choices("local")), Way("global", Choices("global", sharding="contiguous"))]
    assert outlook(keyed_regression(600), ways=ways).sentences == ("The step is 0.5 in all 5 epochs.",)
    assert len(outlook(keyed_regression(600), n_workers=1).sentences) == 1
    assert len(outlook(keyed_regression(50)).sentences) == 1, "too few rows to tell"


def warm_up(epoch):
    return epoch / 10


@pytest.mark.parametrize(
    ("fit", "options", "sentences"),
    [
        ("linear_regression", {"step": 0.5}, ["The step is 0.5 in all 5 epochs."]),
        (
            "linear_regression",
            {"step": 0.5, "schedule": falling(5)},
            ["The step is 0.5 in the first epoch, and 0.1 in the last."],
        ),
        (
            "linear_regression",
            {"step": 0.5, "schedule": Decay(0.5)},
            ["The step is 0.5 in the first epoch, and 0.0312 in the last."],
        ),
        (
            "linear_regression",
            {"step": 0.5, "step_decay": 0.5},
            ["The step is 0.5 in the first epoch, and 0.0312 in the last."],
        ),
        (
            "linear_regression",
            {"step": 0.5, "schedule": warm_up},
            ["The step is 0 in the first epoch, and 0.2 in the last."],
        ),
        ("parallel_sgd", {"estimator": None}, []),
        (
            "parallel_sgd",
            {"estimator": None, "schedule": Decay(0.5)},
            ["Steps of the last epoch are 0.0625 times those of the first."],
        ),
        ("parallel_sgd", {"estimator": None, "schedule": warm_up}, []),
        (user_fit, {}, []),
        (user_fit, {"schedule": "linear"}, []),
    ],
)
def test_steps(fit, options, sentences):
    assert outlook(keyed_regression(50), Training(fit, epochs=5, **options)).sentences == tuple(sentences)


@pytest.mark.parametrize(
    ("batch_size", "batch_norm", "warning"),
    [
        (8, True, "sees 8 samples and 3 of 12 classes in a mini-batch"),
        (16, True, "sees 3 of 12 classes in a mini-batch"),
        (1000, True, "sees 3 of 12 classes in a mini-batch"),
        (8, False, ""),
    ],
)
def test_batch_norm_that_sees_little_is_warned_of(batch_size, batch_norm, warning):
    arrays = {"x": np.ones((2400, 2)), "y": np.arange(2400) // 200}
    network = Network((2, 4, 12), batch_norm)
    training = Training("synchronous_sgd", network=network, batch_size=batch_size, step=0.1)
    assert warning in " ".join(said := outlook(arrays, training).sentences)
    assert any("batch norm, which" in sentence for sentence in said) == bool(warning)
    random_shards = [Way("local", Choices("local"))]
    said = outlook(arrays, training, ways=random_shards).sentences
    assert any("batch norm, which" in sentence for sentence in said) == (batch_norm and batch_size < 16)


def test_batch_norm_of_a_module_is_seen(torch):

    def warned(*layers):
        options = {"make_model": lambda: torch.nn.Sequential(*layers), "make_optimizer": torch.optim.SGD}
        training = Training("torch_ddp", batch_size=4, **options)
        return any("batch norm" in sentence for sentence in outlook(keyed_regression(50), training).sentences)

    assert warned(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    assert not warned(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    assert not warned(torch.nn.SyncBatchNorm(3)), "its statistics are those of all workers"
