"""What a mini-batch of ``fit_torch_ddp`` costs: a loss of the module's output, or a function of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.training.inputs import check_names

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from a module's output and the targets to a mean over the mini-batch."""

TensorBatch = Mapping[str, torch.Tensor]
"""The arrays of a mini-batch, by name."""

OwnFunction = Callable[[Any, TensorBatch], torch.Tensor]
"""Function from the module and a mini-batch to a mean over its samples."""


class Comparison:
    """The loss and the metric of a fit, as functions of a module's output and the targets.

    Both get the two in the first form that the loss accepts: with the output in the shape of the targets, if they
    differ in axes of length 1 only; as they are; or with labels as int64, if the output has a score for each class.

    Parameters
    ----------
    metric
        Mean of another measure. ``None``: the fraction of wrong labels, or the loss.
    target
        Name of the array of targets, for errors.
    """

    def __init__(self, loss: Loss, metric: Loss | None, target: str) -> None:
        self._loss, self._metric, self._target = loss, metric, target
        self._forms: dict[Any, tuple[bool, torch.dtype]] = {}

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a mini-batch."""
        return self._loss(*self._formed(output, targets))

    def error(self, output: Any, targets: torch.Tensor) -> float:
        """The mean of the metric over a mini-batch."""
        output, targets = self._formed(output, targets)
        if self._metric is None and _is_scores(output, targets):
            return float((output.argmax(dim=1) != targets).double().mean())
        return float((self._metric or self._loss)(output, targets))

    def _formed(self, output: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
        if not isinstance(output, torch.Tensor) or output.shape == targets.shape:
            return output, targets
        shapes = tuple(output.shape[1:]), tuple(targets.shape[1:])
        key = *shapes, targets.dtype
        if key not in self._forms or len(output) != len(targets):
            alike = [[n for n in shape if n != 1] for shape in shapes]
            forms = [(True, targets.dtype)] * (alike[0] == alike[1] and len(output) == len(targets))
            forms += [(False, targets.dtype)] + [(False, torch.int64)] * _is_scores(output, targets)
            self._forms[key] = self._accepted(output, targets, forms)
        reshaped, dtype = self._forms[key]
        return output.reshape(targets.shape) if reshaped else output, targets.to(dtype)

    def _accepted(
        self, output: torch.Tensor, targets: torch.Tensor, forms: Sequence[tuple[bool, torch.dtype]]
    ) -> tuple[bool, torch.dtype]:
        refusal: Exception | None = None
        for reshaped, dtype in forms:
            try:
                with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
                    warnings.filterwarnings("error", message="Using a target size")  # which would broadcast
                    scores = output.detach().requires_grad_()
                    loss = self._loss(scores.reshape(targets.shape) if reshaped else scores, targets.to(dtype))
                    torch.autograd.grad(loss, scores)
                return reshaped, dtype
            except Exception as error:  # the loss is the user's function, so this may be any error
                refusal = error
        raise InvalidParameter.of(
            "target",
            self._target,
            "an array of integer labels for class scores, or one of the output's shape (the output has the shape "
            f"{tuple(output.shape)}, the target the shape {tuple(targets.shape)} and the dtype {_name(targets)})",
            "The loss does not accept these, or would broadcast them. Change what the module returns, or reshape and "
            "cast the target in the loss.",
        ) from refusal


def _is_scores(output: Any, targets: torch.Tensor) -> bool:
    """Whether the targets are labels, and the output has a score for each class on its second axis."""
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return (
        whole and isinstance(output, torch.Tensor) and output.ndim > 1
        and output.shape[:1] + output.shape[2:] == targets.shape
    )  # fmt: skip


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class SupervisedStep:
    """A step on a loss of the module's output for one array and the targets in another."""

    def __init__(self, loss: Loss, metric: Loss | None, features: str, target: str) -> None:
        self._comparison = Comparison(loss, metric, target)
        self._features, self._target = features, target

    def arrays(self, names: Collection[str]) -> list[str]:
        """The arrays of a mini-batch, of those of the dataset."""
        check_names(names, features=self._features, target=self._target)
        return list(dict.fromkeys((self._features, self._target)))

    def check(self, batch: TensorBatch, sample_ids: NDArray[np.int64]) -> None:
        """Check that features and targets are finite; the error names the sample."""
        for parameter, name in (("features", self._features), ("target", self._target)):
            finite = torch.isfinite(batch[name]).reshape(len(batch[name]), -1).all(dim=1)
            if not finite.all():
                allowed = f"an array of finite values (sample {sample_ids[int(finite.int().argmin())]} is not finite)"
                raise InvalidParameter.of(parameter, name, allowed)

    def loss(self, model: Any, batch: TensorBatch) -> torch.Tensor:
        """The mean loss over a mini-batch, with its gradient."""
        loss: torch.Tensor = self._compared(self._comparison.loss, model, batch)
        return loss

    def error(self, model: Any, batch: TensorBatch) -> float:
        """The mean error over a mini-batch of a module in evaluation mode, without a gradient."""
        return float(self._compared(self._comparison.error, model, batch))

    def _compared(self, function: Callable[..., Any], model: Any, batch: TensorBatch) -> Any:
        try:
            return function(model(batch[self._features]), batch[self._target])
        except RuntimeError as error:
            arrays = " and ".join(f"{name!r} has {_name(batch[name])}" for name in (self._features, self._target))
            parameters = " and ".join(sorted(set(map(_name, model.parameters()))))
            if _name(batch[self._features]) not in parameters:
                error.add_note(
                    f"The array {arrays}, as in the dataset, and the module's parameters have {parameters}. If that is "
                    "the reason, cast the features in the module's forward and the target in the loss, or make the "
                    "module with other dtypes."
                )
            raise


class OwnStep:
    """A step on a function of the module and all arrays, or those of some names."""

    def __init__(self, function: OwnFunction, names: Sequence[str] | None, metric: OwnFunction | None) -> None:
        self._function, self._names, self._metric = function, names, metric or function

    def arrays(self, names: Collection[str]) -> list[str]:
        """See :class:`SupervisedStep`."""
        for name in self._names or ():
            check_names(names, arrays=name)
        return list(names if self._names is None else self._names)

    def check(self, batch: TensorBatch, sample_ids: NDArray[np.int64]) -> None:
        """Nothing: the function knows what it can use. Parameters that are not finite are noticed after the epoch."""

    def loss(self, model: Any, batch: TensorBatch) -> torch.Tensor:
        """What the function returns."""
        loss = self._function(model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                kind += " without a gradient"
            raise InvalidParameter.because(
                "training_step",
                f"it returned {kind}",
                "It must return the mean loss of the mini-batch, a tensor with one number and its gradient.",
            )
        return loss.reshape(())

    def error(self, model: Any, batch: TensorBatch) -> float:
        """The metric, or the loss."""
        return float(self._metric(model, batch))


TrainingStep = SupervisedStep | OwnStep
