"""The exception tree: every error that dshuffle raises on purpose is a :class:`DShuffleError`.

All classes take one message, so that they survive the pickling between client, scheduler and workers.
"""

from __future__ import annotations

from typing import Self


class DShuffleError(Exception):
    """Root of the errors raised by dshuffle."""


class InvalidParameter(DShuffleError, ValueError):
    """A parameter has a value that is not allowed."""

    @classmethod
    def of(cls, name: str, value: object, allowed: str, hint: str = "") -> Self:
        """Build the message: which parameter, its value, what was allowed, what to do.

        Examples
        --------
        >>> print(InvalidParameter.of("workers", 0, "an integer >= 1"))
        workers=0 is not allowed; it must be an integer >= 1
        """
        message = f"{name}={value!r} is not allowed; it must be {allowed}"
        return cls(f"{message}. {hint}" if hint else message)

    @classmethod
    def because(cls, name: str, reason: str, hint: str = "") -> Self:
        """Build the message where no single value is at fault: which parameter, what is wrong, what to do.

        Examples
        --------
        >>> print(InvalidParameter.because("estimator", "it has no partial_fit", "Use an SGDRegressor."))
        estimator is not allowed: it has no partial_fit. Use an SGDRegressor.
        """
        message = f"{name} is not allowed: {reason}"
        return cls(f"{message}. {hint}" if hint else message)


class DatasetError(DShuffleError):
    """A dataset cannot be created, opened or read."""


class DatasetNotFound(DatasetError, FileNotFoundError):
    """Nothing, or something that is no dataset, stands at the URL."""


class DatasetExists(DatasetError, FileExistsError):
    """A dataset stands at the URL already and ``overwrite`` was not given."""


class CorruptChunk(DatasetError, OSError):
    """A chunk is missing, truncated or fails its checksum; the message names it."""


class PlanError(DShuffleError):
    """A plan does not deliver what was demanded; a bug in the planner, never sent."""


class CacheBudgetError(MemoryError, DShuffleError):  # in this order it can be made anew from a pickle
    """A worker's cache partition does not fit its byte budget."""


class ExchangeError(DShuffleError, RuntimeError):
    """An exchange could not be finished; all workers are still on the epoch before it."""


class ChecksumMismatch(ExchangeError):
    """A row arrived with other bytes than those that the store held."""


class StaleEpoch(DShuffleError, RuntimeError):
    """A partition of an epoch that has ended was used."""


class ClusterError(DShuffleError, RuntimeError):
    """The Dask cluster cannot carry the shuffle: no workers, a failed set-up, a lost worker."""


class WorkerLost(ClusterError):
    """A worker that owned a cache partition has left the cluster."""


class PeerFailed(ClusterError):
    """A step that all ranks take together cannot be taken, because another rank has failed."""


class ShardingWarning(UserWarning):
    """A way of giving out samples is possible, but some group is too small for every worker to get a part of it."""
