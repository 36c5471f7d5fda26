"""The options of a session: what a user chooses beside the dataset and the way of shuffling."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, GivenSharding
from dshuffle.planning.cost import ClusterRates
from dshuffle.runtime.dataset_inputs import STRATIFIED
from dshuffle.runtime.quantities import as_nbytes, as_switch
from dshuffle.runtime.worker_choice import WorkerChoice

LOCAL = "local"
"""Value of ``cache_directory`` for the local directory of each Dask worker."""

ON_LOSS = ("replace", "shrink", "raise")
"""What a session can do when a worker is lost."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The keywords of a :class:`dshuffle.Shuffler` that neither choose a way of shuffling nor where a session starts.

    They are checked here. A pipeline, the request for a session, and the session on its workers hold them as one value.
    A checkpoint holds only the way of shuffling, because a job that goes on may run on another cluster.

    Parameters
    ----------
    on_loss
        What happens when a worker is lost; None for ``"shrink"`` if the session is elastic, else ``"replace"``.
    memory_limit
        Maximum bytes of a worker's partition; None for a part of the worker's own limit. Text such as ``"2 GiB"`` is
        parsed.
    cache_directory
        Folder for the rows on each worker, or ``"local"`` for the worker's own; None to keep them in memory.
    keep_cache
        Whether partitions outlive the session.
    server
        Address or name of the worker that serves. A number is taken as a name.
    workers
        Addresses or names of the workers that may be members; None for all. Numbers are taken as names.
    resources
        Amounts of Dask resources that a worker must have to train; None for any.
    cluster
        Rates for the delivery ``"auto"``.
    elastic
        Whether workers may join and leave between epochs.
    min_workers
        Number of workers to wait for, and that must stay.

    Raises
    ------
    InvalidParameter
        If a value is not allowed, or contradicts another one.

    Examples
    --------
    >>> options = SessionOptions(elastic=True, cache_directory="/scratch")
    >>> options.on_loss, options.keywords()
    ('shrink', {'on_loss': 'shrink', 'cache_directory': '/scratch', 'elastic': True})
    """

    on_loss: str | None = None
    memory_limit: int | None = None
    cache_directory: str | None = None
    keep_cache: bool = False
    server: str | None = None
    workers: tuple[str, ...] | None = None
    resources: dict[str, float] | None = None
    cluster: ClusterRates | None = None
    elastic: bool = False
    min_workers: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _READ[field.name](field.name, getattr(self, field.name)))
        if self.on_loss is None:
            object.__setattr__(self, "on_loss", "shrink" if self.elastic else "replace")
        elif self.elastic and self.on_loss != "shrink":
            raise InvalidParameter.of("on_loss", self.on_loss, "'shrink', or left out, in an elastic session")
        if self.keep_cache and self.cache_directory in (None, LOCAL):
            reason = f"cache_directory={self.cache_directory!r} does not outlive a job"
            hint = "Give a folder on a local disk that is still there when the next job runs."
            raise InvalidParameter.because("keep_cache=True", reason, hint)
        if self.workers is not None and self.min_workers > len(self.workers):
            allowed = f"at most {len(self.workers)}, the number of workers that workers= names"
            raise InvalidParameter.of("min_workers", self.min_workers, allowed)

    @property
    def choice(self) -> WorkerChoice:
        """The workers that may be members of the session."""
        named = None if self.workers is None else frozenset(self.workers)
        return WorkerChoice(named, self.resources or {}, frozenset(() if self.server is None else (self.server,)))

    @property
    def awaited_workers(self) -> int:
        """Number of workers that are waited for: all that are named, unless the session is elastic."""
        return self.min_workers if self.workers is None or self.elastic else len(self.workers)

    @property
    def on_disk(self) -> bool:
        """Whether rows are in files, and do not count as memory."""
        return self.cache_directory is not None

    def keywords(self) -> dict[str, Any]:
        """The options that do not have their defaults, as keyword arguments of :class:`dshuffle.Shuffler`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}

    def check_way(self, choices: Choices) -> None:
        """Refuse a way of shuffling that a session with these options cannot have.

        Raises
        ------
        InvalidParameter
            If rates are given that no choice uses, or a sharding or shares for one number of workers, which may change.
        """
        if self.cluster is not None and not choices.is_auto:
            allowed = f"None with delivery={choices.delivery!r}"
            raise InvalidParameter.of("cluster", self.cluster, allowed, "Only delivery='auto' uses it.")
        if choices.shares.for_fixed_workers and self.on_loss == "shrink":
            name = "elastic" if self.elastic else "on_loss='shrink'"
            reason = f"shares={str(choices.shares)!r} are for one number of workers"
            raise InvalidParameter.because(name, reason, "Use shares by the names of workers, 'measured' or 'even'.")
        sharding = choices.sharding
        fixed = isinstance(sharding, GivenSharding) and not sharding.name.startswith(STRATIFIED)
        if fixed and self.on_loss == "shrink":
            name = "elastic" if self.elastic else "on_loss='shrink'"
            hint = "It is for one number of workers. Use 'random', 'contiguous', 'round-robin' or 'stratified:LABELS'."
            raise InvalidParameter.because(name, f"the sharding {str(sharding)!r} was given", hint)


def _on_loss(name: str, value: object) -> object:
    if value is not None and value not in ON_LOSS:
        raise InvalidParameter.of(name, value, f"one of {', '.join(map(repr, ON_LOSS))}")
    return value


def _memory_limit(name: str, value: object) -> int | None:
    return None if value is None else as_nbytes(name, value)


def _cache_directory(name: str, value: object) -> str | None:
    # Absolute, because workers have other working directories than the client.
    if value is None or value == LOCAL:
        return LOCAL if value == LOCAL else None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not os.path.isabs(path):
        allowed = f"None, {LOCAL!r}, or the absolute path of a folder on a local disk of every worker"
        raise InvalidParameter.of(name, value, allowed)
    return path


def _server(name: str, value: object) -> str | None:
    if isinstance(value, bool) or not (value is None or isinstance(value, str | int)):
        raise InvalidParameter.of(name, value, "None, or the name or address of a worker")
    return None if value is None else str(value)


def _workers(name: str, value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value if isinstance(value, list | tuple) else ()
    if not names or not all(map(_is_name, names)):
        raise InvalidParameter.of(name, value, "None, or a list of at least one address or name of a worker")
    return tuple(dict.fromkeys(map(str, names)))


def _is_name(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _resources(name: str, value: object) -> dict[str, float] | None:
    if value is None:
        return None
    amounts = value if isinstance(value, Mapping) else {}
    if not amounts or not all(isinstance(key, str) and key and _is_amount(amount) for key, amount in amounts.items()):
        allowed = "None, or a mapping of at least one Dask resource to a positive amount, such as {'GPU': 1}"
        raise InvalidParameter.of(name, value, allowed)
    return {key: float(amount) for key, amount in amounts.items()}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _cluster(name: str, value: object) -> ClusterRates | None:
    if not (value is None or isinstance(value, ClusterRates)):
        raise InvalidParameter.of(name, value, "None or a ClusterRates, as dshuffle.measure_cluster returns it")
    return value


def _min_workers(name: str, value: object) -> int:
    return as_integer(name, value, 1)


_READ: dict[str, Callable[[str, object], Any]] = {
    "on_loss": _on_loss,
    "memory_limit": _memory_limit,
    "cache_directory": _cache_directory,
    "keep_cache": as_switch,
    "server": _server,
    "workers": _workers,
    "resources": _resources,
    "cluster": _cluster,
    "elastic": as_switch,
    "min_workers": _min_workers,
}
"""How each option is read from its name and value."""

OPTION_NAMES = frozenset(_READ)
"""The names of all options."""

DEFAULTS = SessionOptions()
