"""What a mini-batch of ``fit_torch_ddp`` costs: a loss of the module's output, or a function of the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.training.inputs import check_names
from dshuffle.training.torch_targets import Comparison, Loss, dtypes_in_notes

TensorBatch = Mapping[str, torch.Tensor]
"""The arrays of a mini-batch, by name."""

OwnFunction = Callable[[Any, TensorBatch], torch.Tensor]
"""Function from the module and a mini-batch to a mean over its samples."""


class TrainingStep(ABC):
    """How a module is trained and measured on a mini-batch."""

    @abstractmethod
    def arrays(self, names: Collection[str]) -> list[str]:
        """The arrays of a mini-batch, of those of the dataset.

        Raises
        ------
        InvalidParameter
            If the dataset does not have one of them.
        """

    @abstractmethod
    def check(self, batch: TensorBatch, sample_ids: NDArray[np.int64]) -> None:
        """Check that a mini-batch can be trained on.

        Raises
        ------
        InvalidParameter
            If it cannot.
        """

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
        Functions from output and targets to a mean; see :class:`~dshuffle.training.torch_targets.Comparison`.
    features, target
        Names of the arrays.
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
        """What the function returns.

        Raises
        ------
        InvalidParameter
            If that is not a number with a gradient.
        """
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
