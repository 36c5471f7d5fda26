"""A simulated session gives what a session on a cluster gives, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import SGDClassifier

import dshuffle
from dshuffle.compare import Way, local_cluster
from dshuffle.compare.pairs import trained_on
from dshuffle.compare.simulated import SimulatedCluster
from dshuffle.errors import InvalidParameter, TrainingDiverged
from dshuffle.planning import Choices
from dshuffle.store import write_sharding
from dshuffle.synthetic import gaussian_blobs, keyed_regression
from dshuffle.training import fit_linear_regression, fit_parallel_sgd

WAYS = [
    Choices("local", sharding="contiguous", seed=3),
    Choices("local", seed=3),
    Choices("partial:0.3", sharding="contiguous", seed=3),
    Choices("chunks", "storage", seed=3),
    Choices("global", seed=3),
    Choices("global", "clique", cache_fraction=0.75, seed=3),
    Choices("local", sharding="stratified:label", seed=3),
    Choices("partial:0.3", sharding="mine", seed=3),
    Choices("aligned", caching="even", cache_fraction=0.5, seed=3),
    Choices("aligned", caching="even", cache_fraction=0.75, seed=3),
    Choices("aligned", caching="uniform", cache_fraction=0.5, seed=3),
]
QUICK = [
    Choices("partial:0.3", sharding="contiguous", seed=3),
    Choices("global", "clique", cache_fraction=0.75, seed=3),
]


@pytest.fixture(scope="module")
def client():
    with local_cluster(3, processes=False) as client:
        yield client


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    arrays = {name: array.compute() for name, array in keyed_regression(600, n_dense=4, noise=0.1).items()}
    arrays["label"] = np.arange(600) % 7
    url = tmp_path_factory.mktemp("simulated") / "d.zarr"
    dataset = dshuffle.create_dataset(url, arrays, chunk_rows=50)
    write_sharding(dataset, "mine", np.arange(600) // 200)
    return dataset


@pytest.mark.parametrize(
    "choices", [pytest.param(way, marks=[] if way in QUICK else pytest.mark.slow) for way in WAYS], ids=repr
)
def test_linear_regression(client, regression, choices):
    simulated = fit_linear_regression(SimulatedCluster.of(regression, 3).session(choices), epochs=4, step=0.1)
    with dshuffle.Shuffler(client, regression, **choices.keywords()) as shuffler:
        real = fit_linear_regression(shuffler, epochs=4, step=0.1)
    np.testing.assert_array_equal(simulated.model, real.model)
    # Residuals are summed in another order of the slots.
    errors, expected = ([point.error for point in fit.points] for fit in (simulated, real))
    assert errors == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "choices", [Choices("local", sharding="contiguous", seed=3), Choices("global", seed=3)], ids=repr
)
def test_gradients_averaged_in_every_step(client, regression, choices):
    """As on a cluster, and as plain SGD on the mini-batches of all ranks together."""
    options = {"epochs": 3, "step": 0.4, "average": "gradients", "batch_size": 7}
    cluster = SimulatedCluster.of(regression, 3)
    simulated = fit_linear_regression(cluster.session(choices), **options)
    with dshuffle.Shuffler(client, regression, **choices.keywords()) as shuffler:
        real = fit_linear_regression(shuffler, **options)
        assert [record.needed > 0 for record in shuffler.records[1:]] == [choices.assignment.moves] * 2
    np.testing.assert_allclose(simulated.model, real.model, rtol=1e-5)
    assert [point.error for point in simulated.points] == pytest.approx([point.error for point in real.points])
    unmeasured = fit_linear_regression(cluster.session(choices), **options, measure_error=False)
    np.testing.assert_array_equal(unmeasured.model, simulated.model)
    assert np.isnan([point.error for point in unmeasured.points]).all()
    rows = regression.read_rows(np.arange(600))
    weights = np.zeros(rows["x"].shape[1])
    for epoch in cluster.session(choices).epochs(3):
        n_steps = -(-200 // 7)
        for step in range(n_steps):
            ids = np.concatenate([order[step * 200 // n_steps : (step + 1) * 200 // n_steps] for order in epoch.orders])
            wrong = rows["x"][ids] @ weights - rows["y"][ids]
            weights = weights - 0.4 * wrong @ rows["x"][ids] / len(ids)
    np.testing.assert_allclose(simulated.model, weights, rtol=1e-4, atol=1e-6)


def test_what_is_averaged_is_checked(client, regression):
    with dshuffle.Shuffler(client, regression) as shuffler:
        for options, words in (
            ({"average": "losses"}, "average='losses' is not allowed; it must be models or gradients"),
            ({"batch_size": 2}, 'batch_size=2 is not allowed; it must be 1 with average="models"'),
            ({"batch_size": 201, "average": "gradients"}, r"batch_size=201 is not allowed; it must be in \[1, 200\]"),
        ):
            with pytest.raises(InvalidParameter, match=words):
                fit_linear_regression(shuffler, epochs=1, step=0.1, **options)
        with pytest.raises(TrainingDiverged, match="diverged in epoch"):
            fit_linear_regression(shuffler, epochs=30, step=1e30, average="gradients", batch_size=5)


def test_what_aligned_ways_learn_depends_on_what_is_cached(regression):
    aligned = [Way(str(choices), choices) for choices in WAYS if choices.assignment.needs_holders]
    assert len({trained_on(way) for way in aligned}) == len(aligned) == 3
    cluster = SimulatedCluster.of(regression, 3)
    models = {
        fit_linear_regression(cluster.session(way.choices), epochs=4, step=0.1).model.tobytes() for way in aligned
    }
    assert len(models) == 3
    shared = [Way("few", Choices("global")), Way("many", Choices("global", "clique", cache_fraction=0.75))]
    assert trained_on(shared[0]) == trained_on(shared[1])


def test_a_part_of_a_dataset_and_an_estimator(client, tmp_path):
    arrays = gaussian_blobs(400, n_features=5, n_classes=3)
    train, _ = dshuffle.create_dataset(tmp_path / "d.zarr", arrays, chunk_rows=40).split(0.9)
    estimator, choices = SGDClassifier(random_state=0), Choices("partial:0.5", seed=1)
    simulated = fit_parallel_sgd(SimulatedCluster.of(train, 3).session(choices), estimator, epochs=3)
    with dshuffle.Shuffler(client, train, **choices.keywords()) as shuffler:
        real = fit_parallel_sgd(shuffler, estimator, epochs=3)
    np.testing.assert_array_equal(simulated.model.coef_, real.model.coef_)
