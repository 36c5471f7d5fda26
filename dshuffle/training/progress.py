"""A progress bar for trainers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dshuffle.planning.values import as_integer
from dshuffle.report import TrainingPoint
from dshuffle.report.progress import progress_bar
from dshuffle.training.history import OnEpoch


@contextmanager
def epoch_bar(epochs: int) -> Iterator[OnEpoch]:
    """Show how far a fit is, on the standard error: a live bar on a terminal, elsewhere a line an epoch.

    Parameters
    ----------
    epochs
        As given to the fit.

    Yields
    ------
    Callable
        For the fit's ``on_epoch``.

    Raises
    ------
    InvalidParameter
        ``epochs`` is not an integer of at least 1.

    Examples
    --------
    >>> from dshuffle.report import TrainingPoint
    >>> with epoch_bar(2) as bar:  # fit_linear_regression(shuffler, epochs=2, step=0.1, on_epoch=bar)
    ...     for epoch in range(2):
    ...         bar(TrainingPoint(epoch=epoch, seconds=1.5, error=0.5))
    """
    as_integer("epochs", epochs, 1)

    def show(point: TrainingPoint) -> None:
        metrics = "".join(f", {name} {value:.3g}" for name, value in point.validation.items())
        advance(point.epoch + 1, epochs, f"error {point.error:.3g}{metrics} after {point.seconds:.1f} s")

    with progress_bar() as advance:
        yield show
