"""Trainers with unequal shares: a step of all ranks is a step of one process on all of their samples."""

from __future__ import annotations

import importlib
import time

import numpy as np
import pytest
from distributed import get_worker

import dshuffle
from dshuffle.errors import InvalidParameter
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
    network = Network((5, 8, 4), batch_norm=False)
    shuffler = fake_shuffler(BLOBS, n_workers=3, weights=WEIGHTS)
    history = fit_synchronous_sgd(shuffler, network, epochs=2, batch_size=30, step=0.3, seed=7)
    parameters = network.first_parameters(7)
    for epoch in shuffler.epochs(2):
        assert (
            [len(partition) for partition in epoch.partitions] == share_sizes(305, WEIGHTS).tolist() == [136, 34, 135]
        )
        ranks = [batches_of(partition.sample_ids, 5) for partition in epoch.partitions]  # ceil(136 / 30)
        assert {len(batch) for batch in ranks[1]} == {6, 7}  # a quarter of the others
        for step in range(5):
            union = np.concatenate([batches[step] for batches in ranks])
            parameters = parameters - 0.3 * network.gradient(parameters, BLOBS["x"][union], BLOBS["y"][union])[1]
    np.testing.assert_allclose(history.model.parameters, parameters, atol=1e-10)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_share_of_few_samples_has_larger_batches_beside_it(fake_shuffler, batch_norm):
    """Its 6 samples are 6 batches, or 3 if batch norm needs two samples in a batch. Otherwise there would be 25."""
    network = Network((5, 8, 4), batch_norm=batch_norm)
    shuffler = fake_shuffler(BLOBS, n_workers=3, weights=(1000, 40, 1000))
    [epoch] = shuffler.epochs(1)
    assert [len(partition) for partition in epoch.partitions] == [150, 6, 149]
    history = fit_synchronous_sgd(shuffler, network, epochs=1, batch_size=6, step=0.3, seed=7)
    n_batches = 3 if batch_norm else 6
    ranks = [batches_of(partition.sample_ids, n_batches) for partition in epoch.partitions]
    if not batch_norm:
        parameters = network.first_parameters(7)
        for step in range(n_batches):
            union = np.concatenate([batches[step] for batches in ranks])
            parameters = parameters - 0.3 * network.gradient(parameters, BLOBS["x"][union], BLOBS["y"][union])[1]
        np.testing.assert_allclose(history.model.parameters, parameters, atol=1e-10)
    for partition, batches in zip(epoch.partitions, ranks, strict=True):
        batching = batching_of(partition, 6, 2 if batch_norm else 1)
        assert [len(batching.positions(batch)) for batch in range(len(batching))] == list(map(len, batches))


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


@pytest.mark.slow
def test_a_step_of_torch_ddp_is_one_of_one_process_on_the_union(torch, processes, tmp_path):
    ddp = importlib.import_module("dshuffle.training.torch_ddp")
    blobs = dshuffle.create_dataset(str(tmp_path / "blobs.zarr"), BLOBS, chunk_rows=50)

    def make_model():
        import torch

        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def make_optimizer(parameters):
        import torch

        return torch.optim.SGD(parameters, lr=0.3)

    def order(partition):
        return partition.sample_ids.copy()

    def drops(partition):
        partition.to_torch(4)

    options = {"shares": [4, 1, 4], "seed": 4}
    with dshuffle.Shuffler(processes, blobs, **options) as shuffler:
        history = ddp.fit_torch_ddp(shuffler, make_model, make_optimizer, epochs=2, batch_size=30, seed=5)
    with dshuffle.Shuffler(processes, blobs, **options) as shuffler:
        seen = [processes.gather(epoch.map(order)) for epoch in shuffler.epochs(2)]
        for epoch in shuffler.epochs(1):
            with pytest.raises(InvalidParameter, match=r"mode='drop' is not allowed; it must be 'uneven' with unequal"):
                processes.gather(epoch.map(drops))
            epoch.accept()
    assert [len(own) for own in seen[0]] == [136, 34, 135]
    torch.manual_seed(5)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for orders in seen:
        ranks = [batches_of(own, 5) for own in orders]
        for step in range(5):
            union = np.concatenate([batches[step] for batches in ranks])
            optimizer.zero_grad()
            x, y = torch.from_numpy(BLOBS["x"][union]).float(), torch.from_numpy(BLOBS["y"][union]).long()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    for mine, expected in zip(history.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
