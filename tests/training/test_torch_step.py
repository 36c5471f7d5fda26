"""Training steps of the user's own in ``fit_torch_ddp``: several inputs, accumulated and clipped gradients, metrics."""

from __future__ import annotations

import numpy as np
import pytest

import dshuffle
from dshuffle.errors import InvalidParameter


@pytest.fixture
def two_inputs(tmp_path):
    """Sums of two inputs, and a weight of each sample."""
    rng = np.random.default_rng(0)
    arrays = {"a": rng.normal(size=(305, 3)), "b": rng.normal(size=(305, 2)), "weight": rng.random(305)}
    arrays["when"] = np.arange(305).astype("datetime64[s]")
    arrays["sum"] = arrays["a"] @ [2.0, -1.0, 0.5] + arrays["b"] @ [1.0, -3.0]
    return dshuffle.create_dataset(str(tmp_path / "two.zarr"), arrays, chunk_rows=50), arrays


@pytest.fixture
def of_two_inputs(torch):
    """A module with two inputs and a parameter that is never used, its optimizer, and its training step."""

    def make_model():
        import torch

        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
                self.b = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
                self.unused = torch.nn.Parameter(torch.ones(1))

            def forward(self, a, b):
                return {"sum": (self.a(a) + self.b(b))[:, 0]}

        return Sum()

    def make_optimizer(parameters):
        import torch

        return torch.optim.SGD(parameters, lr=0.2)

    def training_step(module, batch):
        difference = module(batch["a"], batch["b"])["sum"] - batch["sum"]
        return (batch["weight"] * difference**2).mean()

    return make_model, make_optimizer, training_step


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 0.5])
def test_a_step_of_ones_own_over_accumulated_batches(torch, ddp, processes, two_inputs, of_two_inputs, most):
    """All mini-batches of an epoch are one step, of clipped gradients, of the whole dataset in one process."""
    dataset, arrays = two_inputs
    make_model, make_sgd, training_step = of_two_inputs

    def make_optimizer(parameters):
        optimizer = make_sgd(own := list(parameters))
        if most is not None:
            optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(own, most) and None)
        return optimizer

    with dshuffle.Shuffler(processes, dataset) as shuffler:
        history = ddp.fit_torch_ddp(
            shuffler, make_model, make_optimizer, epochs=2, batch_size=7, training_step=training_step, seed=3,
            arrays=["a", "b", "weight", "sum"], accumulate=1000, ddp_options={"find_unused_parameters": True},
        )  # fmt: skip
    torch.manual_seed(3)
    model = make_model()
    x, weight = np.hstack([arrays["a"], arrays["b"]]), arrays["weight"]
    w = np.hstack([layer.weight.detach().numpy()[0] for layer in (model.a, model.b)])
    for _ in range(2):
        gradient = 2 * x.T @ (weight * (x @ w - arrays["sum"])) / len(x)
        norm = np.linalg.norm(gradient)
        w -= 0.2 * gradient * (1 if most is None else min(1, most / norm))
    trained = np.hstack([layer.weight.detach().numpy()[0] for layer in (history.model.a, history.model.b)])
    np.testing.assert_allclose(trained, w, rtol=1e-6)
    assert history.points[-1].error == pytest.approx((weight * (x @ w - arrays["sum"]) ** 2).mean())


@pytest.mark.slow
def test_a_metric_of_the_module_and_the_batch(torch, ddp, processes, two_inputs, of_two_inputs):
    def metric(module, batch):
        return abs(module(batch["a"], batch["b"])["sum"] - batch["sum"]).mean()

    dataset, arrays = two_inputs
    make_model, make_optimizer, training_step = of_two_inputs
    options = {"training_step": training_step, "arrays": ["a", "b", "weight", "sum"], "metric": metric}
    options["ddp_options"] = {"find_unused_parameters": True}
    with dshuffle.Shuffler(processes, dataset) as shuffler:
        history = ddp.fit_torch_ddp(shuffler, make_model, make_optimizer, epochs=3, batch_size=10, **options)
    output = history.model(*(torch.from_numpy(arrays[name]) for name in "ab"))["sum"].detach().numpy()
    assert history.points[-1].error == pytest.approx(abs(output - arrays["sum"]).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("vector", r"training_step is not allowed: it returned <torch.Tensor>"),
        ("detached", r"it returned tensor\(.*one number and its gradient"),
        ("number", "it returned -?[0-9.]+. It must return the mean loss"),
    ],
)
def test_a_step_that_returns_no_loss_is_refused(ddp, processes, two_inputs, of_two_inputs, result, message):
    make_model, make_optimizer, _ = of_two_inputs

    def training_step(module, batch):
        values = module(batch["a"], batch["b"])["sum"][:10]
        return {"vector": values, "detached": values.mean().detach(), "number": float(values.mean())}[result]

    options = {"batch_size": 20, "training_step": training_step, "arrays": ["a", "b"]}
    with dshuffle.Shuffler(processes, two_inputs[0]) as shuffler, pytest.raises(InvalidParameter, match=message):
        ddp.fit_torch_ddp(shuffler, make_model, make_optimizer, epochs=1, **options)
