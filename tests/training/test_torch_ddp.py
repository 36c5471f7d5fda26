"""PyTorch's DistributedDataParallel inside Dask workers."""

from __future__ import annotations

import importlib
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import dshuffle
from dshuffle.errors import InvalidParameter, WorkerLost
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import Decay, EarlyStopping

BLOBS = {name: array.compute() for name, array in gaussian_blobs(305, n_features=5, n_classes=4).items()}


def test_without_torch_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dshuffle.training.torch_ddp", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'dshuffle\[torch\]'"):
        importlib.import_module("dshuffle.training.torch_ddp")


@pytest.fixture
def blobs(tmp_path):
    return dshuffle.create_dataset(str(tmp_path / "blobs.zarr"), BLOBS, chunk_rows=50)


@pytest.fixture
def makers(torch):
    def make_model():
        import torch

        return torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        )

    def make_optimizer(parameters):
        import torch

        return torch.optim.SGD(parameters, lr=0.3)

    return make_model, make_optimizer


def test_gloo_listens_where_dask_does(ddp):
    assert ddp.interface_of("127.0.0.1") == "lo"
    assert ddp.interface_of("::1") in ("lo", None), "None where there is no IPv6"
    assert ddp.interface_of("192.0.2.1") is None


@pytest.fixture
def orders():
    def order(partition):
        return partition.sample_ids.copy()

    return order


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"assignment": "partial:0.3", "seed": 4}, {"shares": [4, 1, 4]}])
def test_it_is_what_one_process_computes(torch, ddp, processes, blobs, makers, orders, options):
    make_model = makers[0]
    with dshuffle.Shuffler(processes, blobs, **options) as shuffler:
        history = ddp.fit_torch_ddp(
            shuffler, *makers, epochs=3, batch_size=10, seed=5, schedule=Decay(0.5), validate=lambda model: {"one": 1}
        )
    with dshuffle.Shuffler(processes, blobs, **options) as shuffler:
        seen = [processes.gather(epoch.map(orders)) for epoch in shuffler.epochs(3)]

    torch.manual_seed(5)
    model = make_model()
    copies = [make_model() for _ in seen[0]]
    for number, ranks in enumerate(seen):
        steps = -(-max(map(len, ranks)) // 10)
        for step in range(steps):
            gradients, sizes = [], []
            for copy, order in zip(copies, ranks, strict=True):
                chosen = order[len(order) * step // steps : len(order) * (step + 1) // steps]
                with torch.no_grad():
                    for mine, common in zip(copy.parameters(), model.parameters(), strict=True):
                        mine.copy_(common)
                copy.zero_grad()
                x, y = torch.from_numpy(BLOBS["x"][chosen]).float(), torch.from_numpy(BLOBS["y"][chosen]).long()
                torch.nn.functional.cross_entropy(copy.train()(x), y).backward()
                gradients.append([mine.grad for mine in copy.parameters()])
                sizes.append(len(chosen))
            with torch.no_grad():
                for place, parameter in enumerate(model.parameters()):
                    mean = sum(size * one[place] for size, one in zip(sizes, gradients, strict=True)) / sum(sizes)
                    parameter -= 0.3 * 0.5**number * mean
    for mine, common in zip(history.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, common, rtol=1e-4, atol=1e-5)
    # Running statistics are the mean over ranks of their own, weighted by their samples.
    shares = [len(order) / len(BLOBS["y"]) for order in seen[-1]]
    for mine, *own in zip(history.model.buffers(), *(copy.buffers() for copy in copies), strict=True):
        if mine.is_floating_point():
            mean = sum(share * buffer for share, buffer in zip(shares, own, strict=True))
            torch.testing.assert_close(mine, mean, rtol=1e-4, atol=1e-5)
    predicted = history.model(torch.from_numpy(BLOBS["x"]).float()).argmax(dim=1).numpy()
    assert history.points[-1].error == pytest.approx(np.mean(predicted != BLOBS["y"]))


@pytest.mark.slow
def test_a_fit_that_fails_says_why_and_the_next_one_works(torch, ddp, processes, tmp_path, blobs, makers):
    def fit(arrays=None, **options):
        dataset = blobs
        if arrays is not None:
            dataset = dshuffle.create_dataset(str(tmp_path / "bad.zarr"), arrays, chunk_rows=50, overwrite=True)
        with dshuffle.Shuffler(processes, dataset) as shuffler:
            return ddp.fit_torch_ddp(shuffler, *makers, **{"epochs": 2, "batch_size": 20, **options})

    x = BLOBS["x"].copy()
    x[217, 3] = np.nan
    cases = [
        ({"arrays": {**BLOBS, "x": x}}, "sample 217 is not"),
        ({"arrays": {**BLOBS, "y": BLOBS["y"] + 0.5}}, r"target='y'.*integer labels.*float64"),
        ({"batch_size": 103}, r"batch_size=103.*\[1, 101\]"),
        # 101 samples of one rank in 51 mini-batches.
        ({"batch_size": 2}, r"batch_size=2 .*at least 2 samples.*101 to 102 samples"),
        ({"target": "z"}, "target='z'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"epochs": 0}, "epochs=0"),
        ({"timeout": 0}, "timeout=0"),
    ]
    for options, message in cases:
        with pytest.raises(InvalidParameter, match=message):
            fit(**options)
    stopping = EarlyStopping(1, least_change=1.0)
    history = fit(epochs=9, early_stopping=stopping)
    assert history.stopped_early
    assert len(history.points) == 2


@pytest.mark.slow
def test_the_first_fit_of_a_process_may_fail(ddp, cluster_of, tmp_path, makers):
    """The other ranks wait for a gradient, and no longer once the rank that has failed closes its connections."""
    x = BLOBS["x"].copy()
    x[0, 0] = np.nan
    dataset = dshuffle.create_dataset(str(tmp_path / "bad.zarr"), {**BLOBS, "x": x}, chunk_rows=50)
    began = time.monotonic()
    with (
        cluster_of(2, processes=True) as client,
        dshuffle.Shuffler(client, dataset) as shuffler,
        pytest.raises(InvalidParameter, match="sample 0 is not finite"),
    ):
        ddp.fit_torch_ddp(shuffler, *makers, epochs=1, batch_size=20, timeout=150)
    assert time.monotonic() - began < 120


@pytest.fixture
def dying(torch, makers, tmp_path):
    """Makes models of which the one of rank 1 kills its process in these steps, one after the other."""

    def maker(*steps):
        def make_model():
            import os
            import signal

            class Dies(torch.nn.Module):
                def forward(self, x):
                    ranked = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
                    died = len(list(tmp_path.glob("died-*")))
                    if self.training and ranked and [self.calls] == list(steps[died : died + 1]):
                        (tmp_path / f"died-{died}").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    self.calls += self.training
                    return self.inner(x)

            model = Dies()
            model.calls, model.inner = 0, makers[0]()
            return model

        return make_model

    return maker


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(2,), (9,), (9, 1)], ids=["first epoch", "second epoch", "second epoch, twice"])
def test_the_epoch_of_a_lost_worker_starts_again_with_the_same_result(
    torch, ddp, cluster_of, blobs, dying, tmp_path, caplog, steps
):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    with cluster_of(2, processes=True) as client:
        fitted = []
        for maker in (dying(*steps), dying()):
            with dshuffle.Shuffler(client, blobs, seed=3) as shuffler:
                fitted.append(ddp.fit_torch_ddp(shuffler, maker, momentum, epochs=3, batch_size=20, seed=1))
            assert len(list(tmp_path.glob("died-*"))) == len(steps)
        again, undisturbed = fitted
        assert "starts again on all ranks" in caplog.text
    assert [point.error for point in again.points] == [point.error for point in undisturbed.points]
    for one, other in zip(again.model.parameters(), undisturbed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
def test_a_lost_worker_ends_the_fit_if_it_may_not_be_replaced(ddp, cluster_of, blobs, makers, dying):
    with (
        cluster_of(2, processes=True) as client,
        dshuffle.Shuffler(client, blobs, on_loss="raise") as shuffler,
        pytest.raises(WorkerLost, match="rank 1"),
    ):
        ddp.fit_torch_ddp(shuffler, dying(2), makers[1], epochs=2, batch_size=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"ddp_options": {"module": 1}}, r"ddp_options\['module'\] is not allowed: fit_torch_ddp sets it itself"),
        ({"training_step": max, "loss": max}, "loss is not allowed: training_step computes the loss"),
        ({"arrays": ["x"]}, "arrays is not allowed: only a training_step chooses arrays"),
        ({"accumulate": 2, "ddp_options": {"static_graph": True}}, "accumulate is not allowed: a static graph"),
    ],
)
def test_options_that_are_not_allowed(ddp, threads, blobs, makers, options, message):
    with dshuffle.Shuffler(threads, blobs) as shuffler, pytest.raises(InvalidParameter, match=message):
        ddp.fit_torch_ddp(shuffler, *makers, epochs=1, batch_size=10, **options)


@pytest.mark.slow
def test_a_fit_that_was_interrupted_continues(torch, ddp, processes, blobs, makers, tmp_path):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def stop(point):
        if point.epoch == 2:
            raise KeyboardInterrupt

    options = {"epochs": 5, "batch_size": 20, "seed": 1, "schedule": Decay(0.8)}
    with dshuffle.Shuffler(processes, blobs, seed=3) as shuffler:
        whole = ddp.fit_torch_ddp(shuffler, makers[0], momentum, **options)
    place = tmp_path / "checkpoint.json"
    with pytest.raises(KeyboardInterrupt), dshuffle.Shuffler(processes, blobs, seed=3, checkpoint=place) as shuffler:
        ddp.fit_torch_ddp(shuffler, makers[0], momentum, on_epoch=stop, **options)
    with dshuffle.Shuffler.resume(processes, blobs, place) as shuffler:
        continued = ddp.fit_torch_ddp(shuffler, makers[0], momentum, **options)
    # Gradients are summed in another order in the first step of a process group.
    errors, expected = ([point.error for point in one.points] for one in (continued, whole))
    assert errors == pytest.approx(expected, abs=0.01)
    for one, other in zip(continued.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with dshuffle.Shuffler.resume(processes, blobs, place) as shuffler:  # which has ended
        again = ddp.fit_torch_ddp(shuffler, makers[0], momentum, **options)
    assert len(again.points) == 5
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_workers_that_are_threads_are_refused(ddp, threads, blobs, makers):
    with (
        dshuffle.Shuffler(threads, blobs) as shuffler,
        pytest.raises(InvalidParameter, match=r"threads of one process.*processes=True"),
    ):
        ddp.fit_torch_ddp(shuffler, *makers, epochs=1, batch_size=10)


@pytest.mark.slow
def test_integers_stay_integers(torch, ddp, processes, tmp_path):
    """Float32 has no 2**24 + 1, so a cast would train on the row of another id."""
    rows = np.random.default_rng(0).integers(0, 3, 305)
    values = np.array([5, -3, 2])
    arrays = {"x": 2**24 + rows[:, np.newaxis], "y": values[rows]}
    dataset = dshuffle.create_dataset(str(tmp_path / "ids.zarr"), arrays)

    def make_model():
        import torch

        class Table(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.rows = torch.nn.Embedding(3, 1)

            def forward(self, ids):
                return self.rows(ids[:, 0] - 2**24)

        return Table()

    def make_optimizer(parameters):
        import torch

        return torch.optim.SGD(parameters, lr=0.5)

    options = {"epochs": 6, "batch_size": 10, "loss": torch.nn.functional.mse_loss}
    with dshuffle.Shuffler(processes, dataset) as shuffler:
        history = ddp.fit_torch_ddp(shuffler, make_model, make_optimizer, **options)
    np.testing.assert_allclose(history.model.rows.weight.detach().numpy()[:, 0], values, atol=1e-3)
    errors = [point.error for point in history.points]
    assert errors[-1] < 1e-5 < errors[0], "the mean loss, not a fraction of wrong labels"
    with (
        dshuffle.Shuffler(processes, dataset) as shuffler,
        pytest.raises(RuntimeError, match=r"'x' has torch.int64, 'y' has torch.int64"),
    ):
        ddp.fit_torch_ddp(shuffler, lambda: torch.nn.Linear(1, 1), make_optimizer, **options)


def test_another_kind_of_optimizer_is_refused(ddp):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(2, 1)
    first, other = (
        SimpleNamespace(model=SimpleNamespace(module=layer), optimizer=kind(layer.parameters()))
        for kind in (torch.optim.SGD, torch.optim.Adam)
    )
    state = ddp.Process.state(first)
    ddp.Process.load(first, state)
    with pytest.raises(InvalidParameter, match=r"make_optimizer='Adam'.*a function that returns SGD"):
        ddp.Process.load(other, state)
