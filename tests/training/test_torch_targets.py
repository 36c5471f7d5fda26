"""What the loss and the metric of a PyTorch module compare: nothing that broadcasts, and the dtypes of the dataset."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter


@pytest.fixture
def comparison(torch):
    """The loss and the error of an output and targets."""
    made = importlib.import_module("dshuffle.training.torch_ddp").Comparison

    class Compared(made):
        def loss(self, output, y):
            return super().loss(lambda x: x, {"x": output, "y": y})

        def error(self, output, y):
            return super().error(lambda x: x, {"x": output, "y": y})

    return lambda loss, metric=None: Compared(loss, metric, "x", "y")


@pytest.fixture
def functional(torch):
    return torch.nn.functional


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1", "f4", "f8"])
@pytest.mark.parametrize(("of_output", "of_target"), [((1,), ()), ((), (1,)), ((), ()), ((2, 1, 3), (2, 3))], ids=str)
def test_one_number_for_each_target_is_compared_with_it(torch, functional, comparison, dtype, of_output, of_target):
    rng = np.random.default_rng(0)
    output = rng.normal(size=(9, *of_output)).astype("f4")
    y = rng.integers(0, 50, size=(9, *of_target)).astype(dtype)
    mse = comparison(functional.mse_loss)
    expected = np.mean((output.ravel().astype("f8") - y.ravel()) ** 2)
    parameter = torch.from_numpy(output).requires_grad_()
    loss = mse.loss(parameter, torch.from_numpy(y))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    np.testing.assert_allclose(parameter.grad.numpy().ravel(), 2 * (output.ravel() - y.ravel()) / y.size, rtol=1e-4)
    assert mse.error(torch.from_numpy(output), torch.from_numpy(y)) == pytest.approx(expected, rel=1e-5), "no label"


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1"])
@pytest.mark.parametrize("more", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("n", [1, 4, 9])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "smoothed", "one_hot"])
def test_class_scores_are_compared_with_labels(torch, functional, comparison, name, n, more, dtype):
    losses = {
        "cross_entropy": functional.cross_entropy,
        "nll_loss": functional.nll_loss,
        "smoothed": lambda scores, y: functional.cross_entropy(scores, y, label_smoothing=0.1),
        "one_hot": lambda scores, y: functional.mse_loss(
            scores, functional.one_hot(y.long(), 4).movedim(-1, 1).to(scores.dtype)
        ),
    }
    rng = np.random.default_rng(n)
    scores = torch.from_numpy(rng.normal(size=(n, 4, *more)).astype("f4"))
    y = rng.integers(0, 4, size=(n, *more))
    labels = comparison(losses[name])
    seen = torch.from_numpy(y.astype(dtype))
    assert float(labels.loss(scores, seen)) == float(losses[name](scores, torch.from_numpy(y)))
    wrong = np.mean(scores.numpy().argmax(axis=1) != y)
    assert labels.error(scores, seen) == pytest.approx(wrong)


@pytest.mark.parametrize(
    ("loss", "output", "target", "dtype"),
    [
        ("mse_loss", (5, 3), (5,), "int64"),  # as many rows as columns would broadcast
        ("mse_loss", (3, 3), (3,), "float32"),
        ("mse_loss", (5, 3), (5, 1), "float32"),
        ("l1_loss", (5, 1), (5, 3), "float32"),
        ("cross_entropy", (5, 3), (5,), "float64"),
        ("cross_entropy", (5, 3), (5, 1), "int64"),
        ("binary_cross_entropy_with_logits", (5, 1), (5,), "int64"),
        ("mse_loss", (4, 1), (5,), "float32"),
    ],
)
def test_shapes_that_broadcast_and_dtypes_that_do_not_fit_are_refused(
    torch, functional, comparison, loss, output, target, dtype
):
    y = torch.zeros(target, dtype=getattr(torch, dtype))
    with pytest.raises(InvalidParameter) as refused:
        comparison(getattr(functional, loss)).loss(torch.zeros(output), y)
    message = str(refused.value)
    assert message.startswith("target='y' is not allowed")
    assert f"the output has the shape {output}, the target the shape {target} and the dtype torch.{dtype}" in message
    assert "reshape and cast the target in the loss" in message


def test_a_loss_that_takes_parts_of_the_output_gets_it_as_it_is(torch, functional, comparison):
    rng = np.random.default_rng(0)
    output = torch.from_numpy(rng.normal(size=(7, 2)).astype("f4"))
    y = torch.from_numpy(rng.normal(size=7).astype("f4"))

    def gaussian(output, y):
        return functional.gaussian_nll_loss(output[:, 0], y, output[:, 1].exp())

    expected = float(gaussian(output, y))
    compare = comparison(gaussian)
    assert float(compare.loss(output, y)) == expected
    assert compare.error(output, y) == pytest.approx(expected)

    def first(outputs, y):
        return functional.cross_entropy(outputs["scores"], y)

    scores = {"scores": torch.zeros(4, 3)}
    assert float(comparison(first).loss(scores, torch.zeros(4).long())) == pytest.approx(np.log(3))


def test_an_error_of_pytorch_says_which_dtypes_there_are(torch, functional):
    step = importlib.import_module("dshuffle.training.torch_ddp").Comparison(functional.mse_loss, None, "x", "y")
    with pytest.raises(RuntimeError) as raised:
        step.loss(torch.nn.Linear(3, 1), {"x": torch.zeros(4, 3, dtype=torch.float64), "y": torch.zeros(4)})
    assert "'x' has torch.float64, 'y' has torch.float32" in raised.value.__notes__[0]


def test_a_metric_replaces_the_one_that_the_loss_implies(torch, functional, comparison):
    scores, y = torch.tensor([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 1, 1])
    assert comparison(functional.cross_entropy).error(scores, y) == pytest.approx(2 / 3)
    compare = comparison(functional.cross_entropy, metric=lambda scores, y: (scores[:, 0] * y).mean())
    assert compare.error(scores, y) == pytest.approx(2.0)
