from __future__ import annotations

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.training import Network, TrainedNetwork

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((13, 4)), RNG.integers(0, 3, 13)


def start(network):
    # Away from the kinks of ReLU, and with biases and factors that matter.
    return network.first_parameters(1) + 0.1 * np.random.default_rng(2).standard_normal(network.n_parameters)


@pytest.mark.parametrize("starts", [(0,), (0, 4, 9)])
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (4, 6, 3), (4, 6, 5, 3)])
def test_the_gradient_is_that_of_finite_differences(sizes, batch_norm, starts):
    network = Network(sizes, batch_norm)
    parameters = start(network)
    _, gradient, _ = network.gradient(parameters, X, Y, starts)
    steps = 1e-6 * np.eye(len(parameters))
    losses = [[network.gradient(parameters + sign * step, X, Y, starts)[0] for sign in (1, -1)] for step in steps]
    np.testing.assert_allclose(gradient, -np.diff(losses)[:, 0] / 2e-6, atol=1e-7)
    assert np.abs(gradient).max() > 0.01


@pytest.mark.parametrize("batch_norm", [True, False])
def test_one_call_does_the_work_of_many_workers(batch_norm):
    network = Network((4, 6, 5, 3), batch_norm)
    parameters = start(network)
    parts = [slice(0, 4), slice(4, 9), slice(9, 13)]
    losses, gradients, statistics = zip(*[network.gradient(parameters, X[p], Y[p]) for p in parts], strict=True)
    loss, gradient, together = network.gradient(parameters, X, Y, [0, 4, 9])
    weights = [4, 5, 4]
    assert loss == pytest.approx(np.average(losses, weights=weights))
    np.testing.assert_allclose(gradient, np.average(gradients, axis=0, weights=weights), atol=1e-12)
    np.testing.assert_allclose(together, np.concatenate(statistics), atol=1e-12)


def test_running_statistics_of_the_batch_itself_give_what_training_saw():
    network = Network((4, 6, 5, 3))
    parameters = start(network)
    loss, _, [statistics] = network.gradient(parameters, X, Y)
    scores = network.scores(parameters, statistics, X)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert -np.log(chances[np.arange(13), Y]).mean() == pytest.approx(loss)
    trained = TrainedNetwork(network, parameters, statistics)
    assert np.array_equal(trained.predict(X), scores.argmax(axis=1))


def test_extreme_scores_have_finite_losses_and_gradients():
    network = Network((4, 3), batch_norm=False)
    loss, gradient, statistics = network.gradient(1e6 * start(network), X, Y)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert statistics.shape == (1, 0)


@pytest.mark.parametrize(
    ("sizes", "message"), [((4,), "sizes="), ((4, 0, 2), r"sizes\[1\]=0"), ((4, 3, 1), r"sizes\[2\]=1.*>= 2")]
)
def test_shapes_that_are_none_are_refused(sizes, message):
    with pytest.raises(InvalidParameter, match=message):
        Network(sizes)
