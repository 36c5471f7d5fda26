"""The training of a pipeline: a function that trains on a shuffler, and its options."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dshuffle.checks import as_integer
from dshuffle.compare.pairs import HeldOut
from dshuffle.errors import InvalidParameter
from dshuffle.redaction import hide_secrets, short_repr
from dshuffle.report import TrainingPoint
from dshuffle.runtime import Shuffler, gathered
from dshuffle.store import Dataset
from dshuffle.training import OnEpoch, fit_linear_regression
from dshuffle.training.fit import numbers_of

FITS = {
    name: f"dshuffle.training:fit_{name}"
    for name in ("linear_regression", "matrix_completion", "parallel_sgd", "parameter_server", "synchronous_sgd")
} | {"torch_ddp": "dshuffle.training.torch_ddp:fit_torch_ddp"}
"""Trainers by their short names."""

ARRAYS = ("features", "target")
"""Options of trainers that name arrays of the dataset."""


@dataclass(frozen=True, slots=True, init=False)
class Training:
    """A function that trains, and its options.

    Parameters
    ----------
    fit
        Function ``fit(shuffler, *, epochs, **options)``: a trainer of :mod:`dshuffle.training`, its name without
        ``fit_``, or a function of your own. If it has a parameter ``on_epoch``, this is a function to call after every
        epoch: with nothing, the error as a number, a dict of metrics, or a :class:`dshuffle.report.TrainingPoint`. Then
        a pipeline shows progress and can be stopped between epochs, and a report has these numbers.
    epochs
        Number of passes over the dataset, including those of earlier sessions if a checkpoint continues them:
        :attr:`dshuffle.Shuffler.next_epoch` says how many are done.
    **options
        Further arguments of ``fit``. One that is a :class:`~dshuffle.compare.HeldOut` becomes that part of the dataset,
        and the shuffler does not have it. Each pair of runs draws another one.

    Raises
    ------
    InvalidParameter
        If the function is not known, an option is not one of its parameters, or a required one is missing.

    Examples
    --------
    >>> Training("linear_regression", epochs=3, step=0.1)
    Training(fit_linear_regression, epochs=3, step=0.1)
    >>> Training("linear_regression", steps=0.1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: Training(fit_linear_regression) is not allowed: missing a required argument: ...
    """

    fit: Callable[..., Any]
    epochs: int
    options: Mapping[str, Any] = field(hash=False)

    def __init__(self, fit: Callable[..., Any] | str, /, epochs: int = 5, **options: Any) -> None:
        function = named(FITS.get(fit, fit)) if isinstance(fit, str) else fit
        if not callable(function):
            raise InvalidParameter.of("fit", fit, f"a function, or one of {', '.join(sorted(FITS))}")
        object.__setattr__(self, "fit", function)
        object.__setattr__(self, "epochs", as_integer("epochs", epochs, 1))
        object.__setattr__(self, "options", MappingProxyType(options))
        try:
            inspect.signature(function).bind(None, epochs=epochs, **options)
        except TypeError as error:
            names = ", ".join(self.parameters)
            hint = f"It is called with a shuffler, epochs= and the options of the training. Its parameters are {names}."
            raise InvalidParameter.because(f"Training({self.name})", str(error), hint) from None

    def __repr__(self) -> str:
        options = "".join(f", {name}={_in_words(value)}" for name, value in self.options.items())
        return f"Training({self.name}, epochs={self.epochs}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Training, self.fit, self.epochs, **self.options), ()

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function by name."""
        return inspect.signature(self.fit).parameters

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(getattr(self.fit, "__name__", self.fit))

    @property
    def error_meaning(self) -> str:
        """What the error after an epoch is, in words."""
        if self.fit is fit_linear_regression:
            return "the relative residual ‖Xw - y‖ / ‖y‖ on the whole dataset"
        return "the error that the training function reports"

    @property
    def error_at_start(self) -> float | None:
        """The error before the first epoch, if it is known: weights of 0 leave all of the target."""
        return 1.0 if self.fit is fit_linear_regression else None

    def option(self, name: str) -> Any:
        """An option, or its default; None if the function does not have it."""
        return self.options.get(name, self.parameters[name].default if name in self.parameters else None)

    @property
    def averages(self) -> str:
        """What is averaged: ``"gradients"`` in every step, ``"models"`` once an epoch, or ``"unknown"``.

        A function says it with its option ``average``, or with an attribute ``averages``.
        """
        said = self.option("average") or getattr(self.fit, "averages", None)
        return said if said in ("gradients", "models") else "unknown"

    @property
    def held_out(self) -> HeldOut | None:
        """How a part of the dataset is held out, if an option says so."""
        return next((value for value in self.options.values() if isinstance(value, HeldOut)), None)

    def on(self, dataset: Dataset, seed: int) -> tuple[Training, Dataset]:
        """Draw the held-out part of a dataset; return the training with it, and what is left to train on."""
        if (held_out := self.held_out) is None:
            return self, dataset
        train, test = held_out.split(dataset, seed)
        options = {name: test if isinstance(value, HeldOut) else value for name, value in self.options.items()}
        return Training(self.fit, self.epochs, **options), train

    @property
    def is_trainer(self) -> bool:
        """Whether the function is a trainer of dshuffle, which does nothing but train."""
        return str(getattr(self.fit, "__module__", "")).startswith("dshuffle.training.")

    def changed(self, *, epochs: int | None = None, seed: int | None = None) -> Training:
        """The same with other epochs, or another ``seed`` if the function has that. No user is told of its epochs."""
        options = {name: value for name, value in self.options.items() if name != "on_epoch"}
        if seed is not None and "seed" in self.parameters:
            options["seed"] = seed
        return Training(self.fit, epochs or self.epochs, **options)

    @property
    def arrays(self) -> dict[str, str]:
        """Names of the arrays that it needs, by option."""
        return {name: array for name in ARRAYS if isinstance(array := self.option(name), str)}

    @property
    def facts(self) -> dict[str, Any]:
        """The training by name, for a report."""
        shown = {
            name: value if isinstance(value, bool | int | float | str) else _in_words(value)
            for name, value in self.options.items()
        }
        return {"training": f"{getattr(self.fit, '__module__', '')}:{self.name}", "epochs": self.epochs, **shown}

    def run(self, shuffler: Shuffler, on_epoch: OnEpoch) -> Any:
        """Train, and call ``on_epoch`` after every epoch, if the function says when one has ended."""
        options = dict(self.options)
        own, began = options.get("on_epoch"), time.perf_counter()

        def report(result: TrainingPoint | Mapping[str, Any] | float | None = None) -> None:
            point = _point_of(result, shuffler.epoch or 0, time.perf_counter() - began)
            if own is not None:
                own(point)
            on_epoch(point)

        if "on_epoch" in self.parameters:
            options["on_epoch"] = report
        return self.fit(shuffler, epochs=self.epochs, **options)


def _point_of(result: Any, epoch: int, seconds: float) -> TrainingPoint:
    """Make a point of the history from what a function reports after an epoch."""
    if isinstance(result, TrainingPoint):
        return result
    try:
        metrics = numbers_of(result if isinstance(result, Mapping) else {"": math.nan if result is None else result})
    except InvalidParameter:
        allowed = "called with nothing, the error as a number, a dict of metrics, or a dshuffle.report.TrainingPoint"
        raise InvalidParameter.of("on_epoch", result, allowed) from None
    return TrainingPoint(epoch=epoch, seconds=seconds, error=metrics.pop("", math.nan), validation=metrics)


def _in_words(value: object) -> str:
    """A value for people: of a function its name, which its text buries under addresses."""
    if isinstance(value, Dataset):
        return f"{value.n_samples} samples of {hide_secrets(value.url)}"
    return value.__name__ if inspect.isroutine(value) else short_repr(value)


def named(name: str) -> Any:
    """Import an object by ``module:name``."""
    module, colon, path = name.partition(":")
    if not colon:
        raise InvalidParameter.of("fit", name, f"a function, one of {', '.join(sorted(FITS))}, or module:name")
    try:
        return operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise InvalidParameter.because("fit", f"{name} cannot be imported: {error}") from error


def each_epoch(
    shuffler: Shuffler,
    fn: Callable[..., Any],
    *,
    epochs: int,
    on_epoch: OnEpoch | None = None,
    **kwargs: Any,
) -> list[list[Any]]:
    """Run a function of your own on every worker in every epoch.

    Parameters
    ----------
    shuffler
        The shuffler.
    fn
        Function ``fn(partition, **kwargs)``, as for :meth:`dshuffle.Epoch.map`.
    epochs
        Number of epochs in all, including those of earlier sessions that this one continues.
    on_epoch
        Function that is called after every epoch, with a point whose error is not a number.
    **kwargs
        Further arguments of ``fn``.

    Returns
    -------
    list
        For each epoch, the results of all workers in rank order.

    Examples
    --------
    >>> Training(each_epoch, epochs=2, fn=len)
    Training(each_epoch, epochs=2, fn=len)
    """
    started, results = time.perf_counter(), []
    for epoch in shuffler.epochs(max(0, epochs - shuffler.next_epoch)):
        results.append(gathered(epoch.map(fn, **kwargs)))
        if on_epoch is not None:
            seconds = time.perf_counter() - started
            on_epoch(TrainingPoint(epoch=epoch.number, seconds=seconds, error=float("nan")))
    return results
