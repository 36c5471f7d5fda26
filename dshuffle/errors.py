"""Exceptions. Every error that dshuffle raises on purpose is a :class:`DShuffleError`.

Each class takes a single message, so that errors can be pickled between client, scheduler and workers. Attributes of an
error are pickled with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from dshuffle.redaction import hide_secrets, short_repr

_MOST_NAMED = 20


class DShuffleError(Exception):
    """Base class of all errors raised by dshuffle. Messages do not show passwords and tokens of URLs.

    Attributes
    ----------
    transient
        Whether another attempt can succeed without a change by the user, perhaps in a new session or on a new cluster.
        Each class has a default. Where an error is raised, it may get another value.

    Examples
    --------
    >>> ClusterError("the scheduler cannot be reached").transient, InvalidParameter("seed").transient
    (True, False)
    >>> ClusterError("epoch 0 has ended", transient=False).transient
    False
    """

    transient: bool = False

    def __init__(self, *args: object, transient: bool | None = None) -> None:
        super().__init__(*(hide_secrets(arg) if isinstance(arg, str) else arg for arg in args))
        if transient is not None:
            self.transient = transient

    def raised_by(self, name: str) -> Self:
        """Return the same error, whose message begins with the name of the process that raised it."""
        error = type(self)(f"{name}: {self}")
        error.transient = self.transient
        return error


class InvalidParameter(DShuffleError, ValueError):
    """A parameter has a value that is not allowed.

    Attributes
    ----------
    hint
        What to do, as the message ends; empty if it ends without.
    """

    hint: str = ""

    @classmethod
    def of(cls, name: str, value: object, allowed: str, hint: str = "") -> Self:
        """Build an error from a parameter's name and value, the allowed values and a hint.

        Examples
        --------
        >>> print(InvalidParameter.of("workers", 0, "an integer >= 1"))
        workers=0 is not allowed; it must be an integer >= 1
        """
        return cls._with_hint(f"{name}={short_repr(value)} is not allowed; it must be {allowed}", hint)

    @classmethod
    def because(cls, name: str, reason: str, hint: str = "") -> Self:
        """Build an error from a parameter's name, the reason and a hint, for cases without a single wrong value.

        Examples
        --------
        >>> print(InvalidParameter.because("estimator", "it has no partial_fit", "Use an SGDRegressor."))
        estimator is not allowed: it has no partial_fit. Use an SGDRegressor.
        """
        return cls._with_hint(f"{name} is not allowed: {reason}", hint)

    @classmethod
    def of_all(cls, errors: Sequence[InvalidParameter]) -> InvalidParameter:
        """Return one error for all that is wrong, such as the columns of a file."""
        if len(errors) == 1:
            return errors[0]
        texts = [str(error).removesuffix(f". {error.hint}") for error in errors[:_MOST_NAMED]]
        if (more := len(errors) - _MOST_NAMED) > 0:
            texts.append(f"and {more} more")
        return cls._with_hint("; ".join(texts), " ".join(dict.fromkeys(error.hint for error in errors if error.hint)))

    @classmethod
    def _with_hint(cls, message: str, hint: str) -> Self:
        error = cls(f"{message}. {hint}" if hint else message)
        error.hint = hide_secrets(hint)
        return error


class TrainingDiverged(InvalidParameter):
    """The parameters of a model are no longer finite. The error names what to change."""


def what_happened(error: BaseException) -> str:
    """Return the first sentence of an error. The next ones say what to do about it, where the error is raised."""
    return str(error).partition(". ")[0]


def reasons_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and all errors that led to it. An error can be its own cause."""
    errors: list[BaseException | None] = [error]
    visited: set[int] = set()
    while errors:
        reason = errors.pop()
        if reason is not None and id(reason) not in visited:
            visited.add(id(reason))
            errors += [reason.__cause__, reason.__context__]
            yield reason


class DatasetError(DShuffleError):
    """A dataset cannot be created, opened or read."""


class DatasetNotFound(DatasetError, FileNotFoundError):
    """No dataset exists at the URL."""


class DatasetExists(DatasetError, FileExistsError):
    """A dataset already exists at the URL and ``overwrite`` is not set."""


class DatasetChanged(DatasetError):
    """The dataset was written again while it was in use, or another process sees a different one."""


class CorruptChunk(DatasetError, OSError):
    """A chunk is missing, truncated or fails its checksum; the message names it."""


class CheckpointError(DShuffleError):
    """The state of a session cannot be written or read, is damaged, or belongs to another dataset or release."""


class PlanError(DShuffleError):
    """A plan does not deliver what the epoch needs. This is a bug in the planner; the plan is not used."""


class CacheBudgetError(MemoryError, DShuffleError):  # unpickling needs this order of bases
    """A worker's partition exceeds its memory budget."""


class ExchangeError(DShuffleError, RuntimeError):
    """An exchange failed. All workers are still on the previous epoch."""

    transient = True


class ChecksumMismatch(ExchangeError):
    """A received row differs from the row in the store."""


class StaleEpoch(DShuffleError, RuntimeError):
    """A partition was used after its epoch had ended."""


class ClusterError(DShuffleError, RuntimeError):
    """The Dask cluster cannot run the shuffle, for instance because it has no workers or because set-up failed."""

    transient = True


class WorkerLost(ClusterError):
    """A worker that held a partition has left the cluster."""


class PeerFailed(ClusterError):
    """A collective step failed because another rank failed."""


class MixingWarning(UserWarning):
    """An assignment is allowed, but another one that moves fewer samples mixes as well."""


class ShardingWarning(UserWarning):
    """A group is too small for every worker to get a sample of it. The sharding is still valid."""
