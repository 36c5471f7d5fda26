"""A session: what a user chooses, which workers it may have, what a client asks for, and what members get."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from distributed.protocol.pickle import dumps, loads

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetChanged, InvalidParameter
from dshuffle.planning import NEW, SERVER, Choices, GivenSharding, Remainder, ShuffleSpec, WorkerHistory
from dshuffle.planning.cost import ClusterRates
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.rows import RowLayout
from dshuffle.runtime.dataset_inputs import STRATIFIED
from dshuffle.runtime.settings import Settings, as_nbytes, as_switch
from dshuffle.store import Dataset

SERVER_RESOURCE = "dshuffle-server"
"""Dask resource of a worker that serves and does not train."""


def only_serves(resources: Mapping[str, float] | None) -> bool:
    """Whether a worker with these Dask resources serves and does not train."""
    return SERVER_RESOURCE in (resources or {})


MOST_NAMES = 8
"""Number of workers that an error lists."""


DaskWorker = Any
"""What a choice looks at of a worker: a :class:`WorkerFacts`, or the scheduler's own ``WorkerState``."""


class WorkerFacts(NamedTuple):
    """A worker that the scheduler has described to a client. Its nanny starts it again with the same name."""

    address: str
    name: object
    nanny: str | None
    resources: dict[str, float]

    @classmethod
    def of_all(cls, described: Mapping[str, Mapping[str, Any]]) -> list[Self]:
        """The workers in the scheduler's information, which is by address."""
        return [
            cls(address, worker.get("name"), worker.get("nanny"), worker.get("resources") or {})
            for address, worker in described.items()
        ]


def identities(worker: DaskWorker) -> frozenset[str]:
    """All texts that name a worker: its address, its name, and the address of its nanny."""
    return frozenset(str(text) for text in (worker.address, worker.name, worker.nanny) if text not in (None, ""))


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The workers that may be members of a session, now and later. By default all of them."""

    workers: frozenset[str] | None = None  # addresses and names of the workers; None for all
    # amounts of Dask resources that a worker must have to train
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    server: frozenset[str] = frozenset()  # Addresses and names of the worker that serves. It may be beside the others.

    @property
    def is_restricted(self) -> bool:
        """Whether some workers may be left out."""
        return self.workers is not None or bool(self.resources)

    def allows(self, worker: DaskWorker) -> bool:
        """Whether a worker may be a member."""
        if not self.is_restricted:
            return True
        names = identities(worker)
        if names & self.server:
            return True
        if self.workers is not None and not names & self.workers:
            return False
        return only_serves(worker.resources) or all(
            worker.resources.get(name, 0) >= amount for name, amount in self.resources.items()
        )

    def resolved(self, present: Iterable[DaskWorker]) -> WorkerChoice:
        """The same choice, which also knows by their other names the workers that are present."""
        named, server = self.workers, self.server
        for worker in present:
            names = identities(worker)
            if self.workers is not None and named is not None and names & self.workers:
                named |= names
            if names & self.server:
                server |= names
        return dataclasses.replace(self, workers=named, server=server)


EVERY_WORKER = WorkerChoice()
"""The default choice."""


def in_words(workers: Collection[DaskWorker]) -> str:
    """Names and addresses of workers, for an error."""
    ordered = sorted(workers, key=lambda worker: (len(str(worker.name)), str(worker.name)))  # 10 comes after 9
    names = [f"{worker.name} ({worker.address})" for worker in ordered]
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def resources_in_words(resources: Mapping[str, float]) -> str:
    """Amounts of resources as the ``--resources`` of a Dask worker."""
    return " ".join(f"{name}={amount:g}" for name, amount in resources.items())


LOCAL = "local"
"""Value of ``cache_directory`` for the local directory of each Dask worker."""

ON_LOSS = ("replace", "raise")
"""What a session can do when a worker is lost."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The keywords of a :class:`dshuffle.Shuffler` that neither choose a way of shuffling nor where a session starts.

    They are checked here. A pipeline, the request for a session, and the session on its workers hold them as one value.
    A checkpoint holds only the way of shuffling, because a job that goes on may run on another cluster.
    """

    on_loss: str = "replace"  # what happens when a worker is lost
    # Maximum bytes of a worker's partition; None for a part of the worker's own limit. Text such as ``"2 GiB"`` is
    # parsed.
    memory_limit: int | None = None
    # folder for the rows on each worker, or ``"local"`` for the worker's own; None to keep them in memory
    cache_directory: str | None = None
    keep_cache: bool = False  # whether partitions outlive the session
    server: str | None = None  # Address or name of the worker that serves. A number is taken as a name.
    # Addresses or names of the workers that may be members; None for all. Numbers are taken as names.
    workers: tuple[str, ...] | None = None
    # amounts of Dask resources that a worker must have to train; None for any
    resources: dict[str, float] | None = None
    cluster: ClusterRates | None = None  # rates for the delivery ``"auto"``
    elastic: bool = False  # whether workers may join and leave between epochs
    min_workers: int = 1  # number of workers to wait for, and that must stay

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            object.__setattr__(self, option.name, _READ[option.name](option.name, getattr(self, option.name)))
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
        """Refuse a way of shuffling that a session with these options cannot have."""
        if self.cluster is not None and not choices.is_auto:
            allowed = f"None with delivery={choices.delivery!r}"
            raise InvalidParameter.of("cluster", self.cluster, allowed, "Only delivery='auto' uses it.")
        if choices.shares.for_fixed_workers and self.elastic:
            reason = f"shares={str(choices.shares)!r} are for one number of workers"
            hint = "Use shares by the names of workers, 'measured' or 'even'."
            raise InvalidParameter.because("elastic", reason, hint)
        sharding = choices.sharding
        fixed = isinstance(sharding, GivenSharding) and not sharding.name.startswith(STRATIFIED)
        if fixed and self.elastic:
            hint = "It is for one number of workers. Use 'random', 'contiguous', 'round-robin' or 'stratified:LABELS'."
            raise InvalidParameter.because("elastic", f"the sharding {str(sharding)!r} was given", hint)


def _is(value: object, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_positive(amounts: Mapping[Any, Any]) -> bool:
    return all(_is(amount, int | float) and 0 < amount < math.inf for amount in amounts.values())


_OPTIONAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object], str]] = {
    "cache_directory": (
        # Absolute, because workers have other working directories than the client.
        lambda path: path == LOCAL or (isinstance(path, str | os.PathLike) and os.path.isabs(os.fsdecode(path))),
        os.fspath,
        f"None, {LOCAL!r}, or the absolute path of a folder on a local disk of every worker",
    ),
    "server": (lambda name: _is(name, str | int), str, "None, or the name or address of a worker"),
    "workers": (
        lambda names: (
            isinstance(names, list | tuple) and names and all(_is(name, str | int) and name != "" for name in names)
        ),
        lambda names: tuple(dict.fromkeys(map(str, names))),
        "None, or a list of at least one address or name of a worker",
    ),
    "resources": (
        lambda amounts: (
            isinstance(amounts, Mapping)
            and amounts
            and all(_is(name, str) and name for name in amounts)
            and _is_positive(amounts)
        ),
        lambda amounts: {name: float(amount) for name, amount in amounts.items()},
        "None, or a mapping of at least one Dask resource to a positive amount, such as {'GPU': 1}",
    ),
    "cluster": (
        lambda rates: isinstance(rates, ClusterRates),
        lambda rates: rates,
        "None or a ClusterRates, as dshuffle.measure_cluster returns it",
    ),
}
"""What options may be that are None by default, how they are read, and in words what they may be."""


def _optional(name: str, value: object) -> Any:
    if value is None:
        return None
    is_allowed, read, allowed = _OPTIONAL[name]
    if not is_allowed(value):
        raise InvalidParameter.of(name, value, allowed)
    return read(value)


def _on_loss(name: str, value: object) -> object:
    if value not in ON_LOSS:
        raise InvalidParameter.of(name, value, f"one of {', '.join(map(repr, ON_LOSS))}")
    return value


_READ: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(_OPTIONAL, _optional),
    "on_loss": _on_loss,
    "memory_limit": lambda name, value: None if value is None else as_nbytes(name, value),
    "keep_cache": as_switch,
    "elastic": as_switch,
    "min_workers": lambda name, value: as_integer(name, value, 1),
}
"""How each option is read from its name and value."""

OPTION_NAMES = frozenset(_READ)
"""The names of all options."""

DEFAULTS = SessionOptions()


PLUGIN = "dshuffle"
"""Name of the scheduler plugin and of the worker plugin, and prefix of all handlers."""

PROTOCOL = 37
"""Protocol version. Increment it whenever messages between processes change; other versions are refused."""


@dataclass(frozen=True, slots=True)
class DatasetReference:
    """A dataset in a form that can be sent: its shape in plain fields, the dataset itself as a nested pickle.

    Unpickling a :class:`Dataset` opens it, which reads from the store. The scheduler may not have access to the store
    and must not wait for it. A worker must not read on its event loop. Therefore only :meth:`open` unpickles it.
    """

    n_samples: int
    layout: RowLayout
    identity: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetReference:
        """Make a reference to an open dataset."""
        dataset.check_unchanged()
        return cls(dataset.n_samples, dataset.layout, dataset.identity, dumps(dataset))

    def open(self) -> Dataset:
        """Open the dataset in this process."""
        dataset: Dataset = loads(self.pickled)
        here, there = (f"{each.identity} and {each.n_samples} samples" for each in (dataset, self))
        if here != there or dataset.layout != self.layout:
            raise DatasetChanged(
                f"the dataset at {dataset.url} is not the one on the client: it has the identity {here} here, and "
                f"{there} there. Either it was rewritten after the client opened it, or this worker has another copy. "
                "Renew the copy if there is one, open the dataset again, and make a new Shuffler"
            )
        return dataset


@dataclass(frozen=True, slots=True)
class PartitionSources:
    """Partitions that a worker can read its first partition from, instead of from the dataset."""

    epoch: int  # the epoch that the partitions are of
    # Address of the worker that holds the partition of a rank, and the id of the session that it belongs to. Ranks
    # whose workers are lost are missing.
    holders: dict[int, tuple[str, str]]
    shuffle: ShuffleSpec | None = None  # Says which rank has which sample. None if all samples are in one partition.
    # Whether the partitions are kept on disks, from sessions that have ended. Instead of the id of a session, each has
    # the name of its folder.
    kept: bool = False


@dataclass(frozen=True, slots=True)
class EarlierWorkers:
    """The workers of an earlier session, whose samples stay where they are as far as possible."""

    history: WorkerHistory  # these workers, and those before them
    epoch: int  # the last epoch in which they trained
    # Rank of every worker, by address. None if the workers have other addresses now, as in another job. Then rank 0
    # goes on with the samples of rank 0, and so on.
    places: Mapping[str, int] | None = None

    @classmethod
    def of(cls, history: WorkerHistory, remainder: Remainder) -> Self | None:
        """Those who trained before what remains; None if nobody did."""
        epoch = remainder.epoch
        before = epoch if remainder.trained or history.epoch == epoch > 0 else epoch - 1
        return None if before < 0 else cls(history, before)

    def placed(self, kept: PartitionSources, addresses: Sequence[str]) -> EarlierWorkers:
        """The same workers with the ranks of the partitions that they have kept, if there are fewer of them now.

        Workers without a partition get the ranks that are left.
        """
        if kept.shuffle is None or kept.shuffle.history != self.history or len(addresses) >= self.history.n_workers:
            return self
        places: dict[str, int] = {}
        for rank, (address, _) in kept.holders.items():
            if address in addresses:
                places.setdefault(address, rank)
        left = iter(sorted(set(range(self.history.n_workers)) - set(places.values())))
        added = {address: next(left) for address in addresses if address not in places}
        return dataclasses.replace(self, places=places | added)

    def weights_of(self, addresses: Sequence[str]) -> Weights:
        """The weights that the workers with these addresses had, by rank; none if these are other or fewer workers."""
        weights = self.history.weights
        if not weights or self.places is None:
            return weights
        # The places of some ranks may be missing: their workers were lost, or have not kept a partition.
        if set(addresses) != set(self.places) or len(addresses) != self.history.n_workers:
            return ()
        return tuple(weights[self.places[address]] for address in addresses)

    def onto(self, shuffle: ShuffleSpec, addresses: Sequence[str], weights: Weights = ()) -> ShuffleSpec:
        """Return the specification for the workers with these addresses and weights, by rank."""
        if isinstance(shuffle.choices.sharding, GivenSharding) or not shuffle.keeps_samples:
            return dataclasses.replace(shuffle, first_weights=weights)
        if self.places is None:
            former = [rank if rank < self.history.n_workers else NEW for rank in range(len(addresses))]
        else:
            former = [self.places.get(address, NEW) for address in addresses]
        first_epoch = shuffle.first_epoch
        history = self.history.changed(former, epoch=first_epoch, carried=self.epoch, weights=weights)
        return shuffle.with_history(history, first_epoch)


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Request of a client for a session, before ranks are assigned."""

    session_id: str
    client_id: str
    dataset: DatasetReference
    choices: Choices
    # the deliveries to choose from in each epoch, and the expected seconds of an exchange with each
    deliveries: dict[str, float]
    # what the user has chosen beside the way of shuffling, and what the client's configuration says
    options: SessionOptions
    settings: Settings
    start: Remainder  # the first epoch, and what earlier sessions have trained on in it
    # Digest of all that decides who trains on which sample, except the workers. Partitions on disk carry it, so that a
    # later session knows whether it may read them. None if partitions end with the session.
    kept_as: str | None = None
    reads_kept: bool = True  # whether first partitions are read from partitions that earlier sessions have kept
    # Id of the session that this one follows, which is open or was lost. Workers read their first partitions from its
    # workers.
    former: str | None = None
    carried: EarlierWorkers | None = None  # the workers of the session that this one goes on from
    # Weight of the share of each worker, by address, in rank order. Only these workers train then, with these ranks.
    # None if the choices say how large shares are.
    weights: Mapping[str, int] | None = None
    # the workers that may be members, by all names that the client knows of them
    choice: WorkerChoice = field(default_factory=WorkerChoice)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session after ranks were assigned; the same object on every participant."""

    session_id: str
    dataset: DatasetReference
    # Everything that plans depend on. If epochs may use different deliveries, it names the one that needs the most
    # memory.
    shuffle: ShuffleSpec
    deliveries: tuple[str, ...]  # deliveries that epochs may use
    options: SessionOptions
    settings: Settings
    start: Remainder  # the first epoch, and what earlier sessions have trained on in it
    # address of every rank, and of the server under :data:`dshuffle.planning.SERVER` if a delivery needs one
    addresses: dict[int, str] = field(default_factory=dict)
    # Random word that only the participants and the scheduler know. A vote without it is refused.
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    kept_as: str | None = None  # the digest of the request
    # partitions from which the first partitions are read, as far as they have the samples
    former: PartitionSources | None = None
    choice: WorkerChoice = field(default_factory=WorkerChoice)  # the workers that may be members
    # bytes that one worker has for its partition or the rows of its server, once it has reserved them; None for any
    # number
    memory_limit: int | None = None

    @property
    def loads_server(self) -> bool:
        """Whether a server loads its rows with the first partitions; it reads those that it sends later otherwise."""
        return SERVER in self.addresses and self.former is None and self.shuffle.choices.assignment.moves

    def packed(self) -> bytes:
        """The session as it is sent: thousands of addresses are alike, and become a tenth of their length."""
        return zlib.compress(dumps(self), level=1)

    @staticmethod
    def unpacked(packed: bytes) -> SessionSpec:
        """The session that :meth:`packed` wrote."""
        spec: SessionSpec = loads(zlib.decompress(packed))
        return spec


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument of :meth:`Epoch.map` with a different value for each worker, in rank order.

    Examples
    --------
    >>> PerRank.of(PerRank(["a", "b"]), 1), PerRank.of("the same", 1)
    ('b', 'the same')
    """

    values: Sequence[Any]

    @staticmethod
    def of(value: Any, rank: int) -> Any:
        """Value of an argument for one rank."""
        return value.values[rank] if isinstance(value, PerRank) else value
