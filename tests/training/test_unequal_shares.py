"""Trainers with unequal shares: a step of all ranks is a step of one process on all of their samples."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import get_worker

import dshuffle
from dshuffle.planning.exchange_epochs import share_sizes
from dshuffle.planning.shares import MEASURED_EPOCHS
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import (
    Network,
    SoftmaxRegression,
    fit_parameter_server,
    fit_synchronous_sgd,
)
from dshuffle.training.fit import batching_of

BLOBS = {name: array.compute() for name, array in gaussian_blobs(305, n_features=5, n_classes=4).items()}
WEIGHTS = (1000, 250, 1000)


def batches_of(order, n_batches):
    """As many batches of a rank as of all others, and every sample in one of them."""
    return [
        order[len(order) * batch // n_batches : len(order) * (batch + 1) // n_batches] for batch in range(n_batches)
    ]


def test_a_synchronous_step_is_one_of_one_process_on_the_union(fake_shuffler):
    assert share_sizes(305, WEIGHTS).tolist() == [136, 34, 135]
    ranks = check_steps(fake_shuffler(BLOBS, n_workers=3, shares="4,1,4"), 30, n_batches=5)  # ceil(136 / 30)
    assert {len(batch) for batch in ranks[1]} == {6, 7}  # a quarter of the others


def check_steps(shuffler, batch_size, n_batches):
    """Two epochs are those of one process; return the samples of each rank in each step of the last one."""
    network = Network((5, 8, 4), batch_norm=False)
    history = fit_synchronous_sgd(shuffler, network, epochs=2, batch_size=batch_size, step=0.3, seed=7)
    parameters = network.first_parameters(7)
    for epoch in shuffler.epochs(2):
        ranks = [batches_of(order, n_batches) for order in epoch.orders]
        for union in map(np.concatenate, zip(*ranks, strict=True)):
            parameters = parameters - 0.3 * network.gradient(parameters, BLOBS["x"][union], BLOBS["y"][union])[1]
    np.testing.assert_allclose(history.model.parameters, parameters, atol=1e-10)
    return ranks


@pytest.mark.parametrize(("least", "n_batches"), [(1, 6), (2, 3)])
def test_a_share_of_few_samples_has_larger_batches_beside_it(fake_shuffler, least, n_batches):
    """Its 6 samples are 6 batches, or 3 if batch norm needs two samples in a batch. Otherwise there would be 25."""
    shuffler = fake_shuffler(BLOBS, n_workers=3, shares="1000,40,1000")
    [epoch] = shuffler.epochs(1)
    assert [len(order) for order in epoch.orders] == [150, 6, 149]
    if least == 1:
        check_steps(shuffler, 6, n_batches)
    for partition in epoch.partitions():
        batching = batching_of(partition, 6, least)
        sizes = [len(batching.positions(batch)) for batch in range(len(batching))]
        assert sizes == list(map(len, batches_of(partition.sample_ids, n_batches)))


def test_a_share_of_few_samples_is_one_batch_of_a_parameter_server(cluster_of):
    dataset = dshuffle.create_dataset("memory://test-parameter-server-shares", BLOBS, overwrite=True)
    with (
        cluster_of(3, processes=False) as client,
        dshuffle.Shuffler(client, dataset, shares=[4, 1, 4]) as shuffler,
    ):
        history = fit_parameter_server(shuffler, SoftmaxRegression(4), epochs=2, batch_size=180, step=0.1)
    # Each rank takes 60 samples at a time, of 136, 34 and 135 in an epoch.
    assert history.staleness.sum(axis=1).tolist() == [6, 2, 6]


class SlowNetwork(Network):
    """A network that takes four times as long for each row on one worker."""

    __slots__ = ()

    def gradient(self, parameters, rows, labels):
        time.sleep(len(rows) * (0.004 if get_worker().name == 1 else 0.001))
        return super().gradient(parameters, rows, labels)


@pytest.mark.slow
def test_measured_shares_in_synchronous_steps(cluster_of):
    """All tasks take equally long, because each step waits for the slow rank. Its own time is what is measured."""
    dataset = dshuffle.create_dataset("memory://test-measured-steps", BLOBS, overwrite=True)
    network = SlowNetwork((5, 8, 4), batch_norm=False)
    with cluster_of(3, processes=False) as client, dshuffle.Shuffler(client, dataset, shares="measured") as shuffler:
        fit_synchronous_sgd(shuffler, network, epochs=MEASURED_EPOCHS + 3, batch_size=26, step=0.1)
    before, after = shuffler.records[MEASURED_EPOCHS], shuffler.records[-1]
    assert before.weights == ()
    assert 100 < after.weights[1] < 700  # 250 on a quiet machine
    assert after.training_seconds < 0.9 * before.training_seconds
