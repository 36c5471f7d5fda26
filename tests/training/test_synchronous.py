from __future__ import annotations

import time

import dask
import numpy as np
import pytest
from distributed import get_worker
from studies.logical_workers import fit_logical_workers

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import Decay, Network, fit_synchronous_sgd

BLOBS = {name: array.compute() for name, array in gaussian_blobs(305, n_features=5, n_classes=4).items()}
NETWORK = Network((5, 8, 4))
OPTIONS = {"epochs": 3, "batch_size": 10, "step": 0.3}


def steps_of(epoch, size=10):
    """The samples of each rank in each step."""
    steps = -(-max(map(len, epoch.orders)) // size)
    for step in range(steps):
        yield [order[len(order) * step // steps : len(order) * (step + 1) // steps] for order in epoch.orders]


def test_without_batch_norm_it_is_mini_batch_sgd_of_one_process(fake_shuffler):
    network = Network((5, 8, 4), batch_norm=False)
    shuffler = fake_shuffler(BLOBS, n_workers=3)
    history = fit_synchronous_sgd(shuffler, network, **OPTIONS, seed=7, schedule=Decay(0.5))
    parameters = network.first_parameters(7)
    seen = []
    for number, epoch in enumerate(shuffler.epochs(3)):
        assert len({len(order) for order in epoch.orders}) > 1, "the weights would not matter"
        for ids in map(np.concatenate, steps_of(epoch)):
            seen += ids.tolist()
            gradient = network.gradient(parameters, BLOBS["x"][ids], BLOBS["y"][ids])[1]
            parameters = parameters - 0.3 * 0.5**number * gradient
    np.testing.assert_allclose(history.model.parameters, parameters, atol=1e-10)
    assert sorted(seen) == sorted(3 * list(range(305))), "every sample once an epoch"
    assert history.points[-1].error == np.mean(history.model.predict(BLOBS["x"]) != BLOBS["y"])
    assert history.points[-1].error < history.points[0].error


def test_batch_norm_is_each_workers_own(fake_shuffler):
    shuffler = fake_shuffler(BLOBS, n_workers=3)
    history = fit_synchronous_sgd(shuffler, NETWORK, **OPTIONS)
    parameters, statistics = NETWORK.first_parameters(0), NETWORK.first_statistics()
    for epoch in shuffler.epochs(3):
        for batches in steps_of(epoch):
            made = [NETWORK.gradient(parameters, BLOBS["x"][ids], BLOBS["y"][ids])[1:] for ids in batches]
            gradients, seen = zip(*made, strict=True)
            gradient = np.average(gradients, axis=0, weights=list(map(len, batches)))
            own = np.average(seen, axis=0, weights=list(map(len, epoch.orders)))
            parameters, statistics = parameters - 0.3 * gradient, 0.9 * statistics + 0.1 * own
    np.testing.assert_allclose(history.model.parameters, parameters, atol=1e-10)
    np.testing.assert_allclose(history.model.statistics, statistics, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 77}, r"batch_size=77.*\[1, 76\]"),
        ({"batch_size": 2}, r"batch_size=2 .*every mini-batch at least 2 samples for batch norm"),
        ({"step": 0}, "step=0"),
        ({"features": "z"}, "features='z'.*arrays: x, y"),
        ({"target": "x"}, "target='x'.*1-D"),
        ({"network": Network((6, 4))}, r"network.sizes\[0\]=6.*5, the width of x"),
        ({"network": Network((5, 3))}, r"y\[\d+\]=3 .*label in \[0, 3\)"),
        ({"step": 1e300, "network": Network((5, 8, 4), batch_norm=False)}, "step=.*diverged in epoch 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(fake_shuffler, options, message):
    options = {"network": NETWORK, **OPTIONS, **options}
    with pytest.raises(InvalidParameter, match=message):
        fit_synchronous_sgd(fake_shuffler(BLOBS), **options)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("y", 0, 0.5, r"target='y'.*integers or booleans.*float64"),
        ("x", (217, 3), np.inf, "sample 217 is not"),
        ("y", 101, -1, r"y\[101\]=-1"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_named(fake_shuffler, name, place, value, message):
    changed = BLOBS[name].astype(np.result_type(BLOBS[name], value))
    changed[place] = value
    with pytest.raises(InvalidParameter, match=message):
        fit_synchronous_sgd(fake_shuffler({**BLOBS, name: changed}), NETWORK, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "ways"), [("threads", {}), ("processes", {}), ("threads", {"every": 2, "between": "reverse"})]
)
def test_on_a_cluster_it_is_what_logical_workers_compute(tmp_path, request, cluster, ways):
    client = request.getfixturevalue(cluster)
    dataset = dshuffle.create_dataset(str(tmp_path / "blobs.zarr"), BLOBS, chunk_rows=50)
    with dshuffle.Shuffler(client, dataset, assignment="partial:0.2", seed=3, **ways) as shuffler:
        history = fit_synchronous_sgd(shuffler, NETWORK, **OPTIONS)
    choices = Choices("partial:0.2", seed=3, **ways)
    simulated = fit_logical_workers(BLOBS, NETWORK, choices, n_workers=shuffler.n_workers, **OPTIONS)
    np.testing.assert_allclose(history.model.parameters, simulated.parameters, atol=1e-9)
    np.testing.assert_allclose(history.model.statistics, simulated.statistics, atol=1e-9)
    assert [record.delivery for record in shuffler.records] == ["load", "none" if ways else "peer", "peer"]
    with pytest.raises(InvalidParameter, match=r"step=.*diverged"), dshuffle.Shuffler(client, dataset) as shuffler:
        fit_synchronous_sgd(shuffler, NETWORK, **{**OPTIONS, "step": 1e308})
    with pytest.raises(InvalidParameter, match="batch_size=1000"), dshuffle.Shuffler(client, dataset) as shuffler:
        fit_synchronous_sgd(shuffler, NETWORK, **{**OPTIONS, "batch_size": 1000})


RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((13, 4)), RNG.integers(0, 3, 13)


def start(network):
    # Away from the kinks of ReLU, and with biases and factors that matter.
    return network.first_parameters(1) + 0.1 * np.random.default_rng(2).standard_normal(network.n_parameters)


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (4, 6, 3), (4, 6, 5, 3)])
def test_the_gradient_is_that_of_finite_differences(sizes, batch_norm):
    network = Network(sizes, batch_norm)
    parameters = start(network)
    _, gradient, _ = network.gradient(parameters, X, Y)
    steps = 1e-6 * np.eye(len(parameters))
    losses = [[network.gradient(parameters + sign * step, X, Y)[0] for sign in (1, -1)] for step in steps]
    np.testing.assert_allclose(gradient, -np.diff(losses)[:, 0] / 2e-6, atol=1e-7)
    assert np.abs(gradient).max() > 0.01


@pytest.mark.parametrize(
    ("sizes", "message"), [((4,), "sizes="), ((4, 0, 2), r"sizes\[1\]=0"), ((4, 3, 1), r"sizes\[2\]=1.*>= 2")]
)
def test_shapes_that_are_none_are_refused(sizes, message):
    with pytest.raises(InvalidParameter, match=message):
        Network(sizes)


@pytest.mark.slow
def test_the_next_epochs_samples_arrive_between_the_steps_of_this_one(tmp_path, processes):
    arrays = {"x": np.zeros((30_000, 128)), "y": np.arange(30_000)}
    dataset = dshuffle.create_dataset(str(tmp_path / "wide.zarr"), arrays, chunk_rows=1000)

    def arrived(partition, group):
        """Rows of the next epoch that are here, step by step."""
        [session] = get_worker().plugins["dshuffle"].sessions.values()
        rows = []
        for _ in range(100):
            time.sleep(0.01)
            group.mean(np.zeros(100))
            rows.append(session.training.receiver.meter.rows)
        return rows

    small = {"dshuffle.message-bytes": "64 KiB", "dshuffle.window-bytes": "256 KiB"}
    with dask.config.set(small), dshuffle.Shuffler(processes, dataset, assignment="global") as shuffler:
        steps, _ = (epoch.together(arrived) for epoch in shuffler.epochs(2))
    for rows in steps:
        # Until the exchange begins there are the 10,000 rows of the first epoch.
        assert len({*rows} - {10_000}) > 4, "not all before the first step, nor all after the last one"
