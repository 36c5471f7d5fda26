"""What a mini-batch of ``fit_torch_ddp`` costs: a loss of the module's output, or a function of the user's own."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.training.inputs import check_names

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from a module's output and the targets to a mean over the mini-batch."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Form in which output and targets are passed to the loss.

    Parameters
    ----------
    labels
        Whether the targets are labels, and the output has a score for each class on its second axis.
    reshaped
        Whether the output takes the shape of the targets, from which it differs in axes of length 1.
    """

    dtype: torch.dtype
    labels: bool = False
    reshaped: bool = False

    def of(self, output: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Output and targets in this form."""
        return output.reshape(targets.shape) if self.reshaped else output, targets.to(self.dtype)


class Comparison:
    """The loss and the metric of a fit.

    Parameters
    ----------
    loss
        Function from a module's output and the targets to the mean loss.
    metric
        Function from the same to the mean of another measure. ``None``: the fraction of wrong labels, or the loss.
    target
        Name of the array of targets, for errors.
    """

    def __init__(self, loss: Loss, metric: Loss | None, target: str) -> None:
        self._loss = loss
        self._metric = metric
        self._target = target
        self._forms: dict[tuple[Shape, Shape, torch.dtype], Form] = {}

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a mini-batch."""
        return self._loss(*self._form(output, targets).of(output, targets))

    def error(self, output: Any, targets: torch.Tensor) -> float:
        """The metric of a mini-batch, multiplied by its number of samples."""
        form = self._form(output, targets)
        output, targets = form.of(output, targets)
        if self._metric is None and form.labels:
            wrong = int(torch.count_nonzero(output.argmax(dim=1) != targets))
            return wrong / int(targets[:1].numel())
        return float((self._metric or self._loss)(output, targets)) * len(targets)

    def _form(self, output: Any, targets: torch.Tensor) -> Form:
        if not isinstance(output, torch.Tensor) or output.shape == targets.shape:
            return Form(targets.dtype)
        shapes = tuple(output.shape[1:]), tuple(targets.shape[1:])
        if output.shape[:1] != targets.shape[:1]:
            raise self._refusal(output, targets)
        key = *shapes, targets.dtype
        if key not in self._forms:
            self._forms[key] = self._tried(output, targets, *shapes)
        return self._forms[key]

    def _tried(self, output: torch.Tensor, targets: torch.Tensor, of_output: Shape, of_target: Shape) -> Form:
        """The form that the loss accepts."""
        integer = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        # Losses of labels accept int64 only, and some of them uint8.
        dtypes = [targets.dtype, torch.int64] if integer and targets.dtype != torch.int64 else [targets.dtype]
        labels = integer and of_output[1:] == of_target
        count = next((count for count in (2, 3, 4) if not _broadcast((count, *of_output), (count, *of_target))), None)
        tries = [] if count is None else [(count, False)]
        if [n for n in of_output if n != 1] == [n for n in of_target if n != 1]:
            tries += [(2, True)] if count is not None else [(2, True), (2, False)]
        refusal: Exception | None = None
        for samples, reshaped in tries:
            for dtype in dtypes:
                scores = output.new_zeros((samples, *(of_target if reshaped else of_output)))
                refusal = self._refused(scores, targets.new_zeros((samples, *of_target), dtype=dtype))
                if refusal is None:
                    return Form(dtype, labels=labels and not reshaped, reshaped=reshaped)
        raise self._refusal(output, targets) from refusal

    def _refused(self, output: torch.Tensor, targets: torch.Tensor) -> Exception | None:
        """The error with which the loss refuses output and targets."""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # mse_loss warns of shapes that broadcast, and then raises
                output = output.detach().requires_grad_()
                torch.autograd.grad(self._loss(output, targets), output)
        except Exception as error:  # the loss is the user's function, so this may be any error
            return error
        return None

    def _refusal(self, output: torch.Tensor, targets: torch.Tensor) -> InvalidParameter:
        return InvalidParameter.of(
            "target",
            self._target,
            "an array of integer labels for class scores, or one of the output's shape (the output has the shape "
            f"{tuple(output.shape)}, the target the shape {tuple(targets.shape)} and the dtype {_name(targets.dtype)})",
            "The loss does not accept these, or would broadcast them. Change what the module returns, or reshape and "
            "cast the target in the loss.",
        )


@contextmanager
def dtypes_in_notes(
    model: torch.nn.Module, features: tuple[str, torch.Tensor], target: tuple[str, torch.Tensor]
) -> Iterator[None]:
    """Add the dtypes to an error of PyTorch, if those of the dataset are not those of the module's parameters."""
    try:
        yield
    except RuntimeError as error:
        parameters = {_name(parameter.dtype) for parameter in model.parameters()}
        arrays = [f"{name!r} has {_name(values.dtype)}" for name, values in (features, target)]
        # Labels are integers whatever the module's parameters are.
        compared = [features[1], target[1]] if target[1].is_floating_point() else [features[1]]
        if {_name(values.dtype) for values in compared} - parameters:
            error.add_note(
                f"The array {' and '.join(arrays)}, as in the dataset, and the module's parameters have "
                f"{' and '.join(sorted(parameters))}. If that is the reason, cast the features in the module's forward "
                "and the target in the loss, or make the module with other dtypes."
            )
        raise


def _broadcast(shape: Shape, other: Shape) -> bool:
    """Whether two shapes broadcast."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TensorBatch = Mapping[str, torch.Tensor]
"""The arrays of a mini-batch, by name."""

OwnFunction = Callable[[Any, TensorBatch], torch.Tensor]
"""Function from the module and a mini-batch to a mean over its samples."""


class TrainingStep(ABC):
    """How a module is trained and measured on a mini-batch."""

    @abstractmethod
    def arrays(self, names: Collection[str]) -> list[str]:
        """The arrays of a mini-batch, of those of the dataset."""

    @abstractmethod
    def check(self, batch: TensorBatch, sample_ids: NDArray[np.int64]) -> None:
        """Check that a mini-batch can be trained on."""

    @abstractmethod
    def loss(self, model: Any, batch: TensorBatch) -> torch.Tensor:
        """The mean loss over a mini-batch, with its gradient."""

    @abstractmethod
    def error(self, model: Any, batch: TensorBatch) -> float:
        """The mean error over a mini-batch of a module in evaluation mode, without a gradient."""


class SupervisedStep(TrainingStep):
    """A loss of the module's output for one array and the targets in another.

    Parameters
    ----------
    loss, metric
        Functions from output and targets to a mean; see :class:`~dshuffle.training.torch_step.Comparison`.
    """

    def __init__(self, loss: Loss, metric: Loss | None, features: str, target: str) -> None:
        self._comparison = Comparison(loss, metric, target)
        self._features, self._target = features, target

    def arrays(self, names: Collection[str]) -> list[str]:
        """Features and target."""
        check_names(names, features=self._features, target=self._target)
        return list(dict.fromkeys((self._features, self._target)))

    def check(self, batch: TensorBatch, sample_ids: NDArray[np.int64]) -> None:
        """Check that features and targets are finite; the error names the sample."""
        for parameter, name in (("features", self._features), ("target", self._target)):
            values = batch[name]
            finite = torch.isfinite(values).reshape(len(values), -1).all(dim=1)
            if not finite.all():
                bad = int(finite.int().argmin())
                raise InvalidParameter.of(
                    parameter, name, f"an array of finite values (sample {sample_ids[bad]} is not finite)"
                )

    def loss(self, model: Any, batch: TensorBatch) -> torch.Tensor:
        """The loss of the output."""
        x, y = batch[self._features], batch[self._target]
        with dtypes_in_notes(model, (self._features, x), (self._target, y)):
            return self._comparison.loss(model(x), y)

    def error(self, model: Any, batch: TensorBatch) -> float:
        """The metric of the output."""
        x, y = batch[self._features], batch[self._target]
        with dtypes_in_notes(model, (self._features, x), (self._target, y)):
            return self._comparison.error(model(x), y) / len(y)


class OwnStep(TrainingStep):
    """A function of the module and all arrays.

    Parameters
    ----------
    function
        Function from the module and the mini-batch to the mean loss.
    names
        Names of the arrays of a mini-batch; None: all of the dataset.
    metric
        Function from the same to the mean error; None: that of the loss.
    """

    def __init__(
        self,
        function: OwnFunction,
        names: Sequence[str] | None,
        metric: Callable[[Any, TensorBatch], Any] | None,
    ) -> None:
        self._function, self._names, self._metric = function, names, metric or function

    def arrays(self, names: Collection[str]) -> list[str]:
        """Those that the user has chosen, or all."""
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
            detached = isinstance(loss, torch.Tensor) and loss.numel() == 1
            raise InvalidParameter.because(
                "training_step",
                f"it returned {kind}{' without a gradient' if detached else ''}",
                "It must return the mean loss of the mini-batch, a tensor with one number and its gradient.",
            )
        return loss.reshape(())

    def error(self, model: Any, batch: TensorBatch) -> float:
        """The metric, or the loss."""
        return float(self._metric(model, batch))
