"""Description of a session, shared by all of its participants."""

from __future__ import annotations

import dataclasses
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from distributed.protocol.pickle import dumps, loads

from dshuffle.errors import ClusterError, DatasetChanged
from dshuffle.planning import NEW, SERVER, Choices, GivenSharding, Remainder, ShuffleSpec, WorkerHistory
from dshuffle.planning.share_sizes import Weights
from dshuffle.rows import RowLayout
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker_choice import WorkerChoice
from dshuffle.store import Dataset

PLUGIN = "dshuffle"
"""Name of the scheduler plugin and of the worker plugin, and prefix of all handlers."""

PROTOCOL = 32
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
    ends: str
    pickled: bytes = field(repr=False)

    @classmethod
    def of(cls, dataset: Dataset) -> DatasetReference:
        """Make a reference to an open dataset. Reads the ends of a few of its chunks.

        Raises
        ------
        DatasetError
            If the dataset has changed since it was opened, or cannot be read any more.
        """
        dataset.check_unchanged()
        return cls(dataset.n_samples, dataset.layout, dataset.identity, dataset.ends(), dumps(dataset))

    def open(self) -> Dataset:
        """Open the dataset in this process.

        Raises
        ------
        ClusterError
            If this process sees a dataset of another shape than the client.
        DatasetChanged
            If this process sees another dataset than the client.
        """
        dataset = loads(self.pickled)
        assert isinstance(dataset, Dataset)
        if dataset.n_samples != self.n_samples or dataset.layout != self.layout:
            raise ClusterError(
                f"the dataset at {dataset.url} differs from the one on the client: {dataset!r}. Make sure that all "
                "workers see the same storage",
                transient=False,
            )
        if dataset.identity != self.identity:
            raise DatasetChanged(
                f"the dataset at {dataset.url} is not the one on the client: its identity is {dataset.identity} here, "
                f"and {self.identity} there. Either it was rewritten after the client opened it, or this worker has a "
                "different copy. Renew the copy if there is one, open the dataset again, and make a new Shuffler"
            )
        if dataset.ends() != self.ends:
            raise DatasetChanged(
                f"chunks of the dataset at {dataset.url} differ from those that the client reads, although its "
                "identity is the same: a copy is damaged or out of date. Renew it, and make a new Shuffler"
            )
        return dataset


def adopted_id(session_id: str, rank: int) -> str:
    """Id of a session on a worker that has adopted a rank beside its own."""
    return f"{session_id}+{rank}"


def base_id(session_id: str) -> str:
    """Id of the session itself, of its own id or one that :func:`adopted_id` made of it."""
    return session_id.partition("+")[0]


def is_adopted_by(session_id: str, other: str) -> bool:
    """Whether another id is one that :func:`adopted_id` made of the id of a session."""
    return other.startswith(f"{session_id}+")


@dataclass(frozen=True, slots=True)
class PartitionSources:
    """Partitions that a worker can read its first partition from, instead of from the dataset.

    Parameters
    ----------
    epoch
        The epoch that the partitions are of.
    holders
        Address of the worker that holds the partition of a rank, and the id of the session that it belongs to. Ranks
        whose workers are lost are missing.
    shuffle
        Says which rank has which sample. None if all samples are in one partition.
    kept
        Whether the partitions are kept on disks, from sessions that have ended. Instead of the id of a session, each
        has the name of its folder.
    """

    epoch: int
    holders: dict[int, tuple[str, str]]
    shuffle: ShuffleSpec | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class EarlierWorkers:
    """The workers of an earlier session, whose samples stay where they are as far as possible.

    Parameters
    ----------
    history
        These workers, and those before them.
    epoch
        The last epoch in which they trained.
    places
        Rank of every worker, by address. None if the workers have other addresses now, as in another job. Then
        rank 0 goes on with the samples of rank 0, and so on.
    """

    history: WorkerHistory
    epoch: int
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
    """Request of a client for a session, before ranks are assigned.

    Parameters
    ----------
    deliveries
        The deliveries to choose from in each epoch, and the expected seconds of an exchange with each.
    options, settings
        What the user has chosen beside the way of shuffling, and what the client's configuration says.
    start
        The first epoch, and what earlier sessions have trained on in it.
    kept_as
        Digest of all that decides who trains on which sample, except the workers. Partitions on disk carry it, so that
        a later session knows whether it may read them. None if partitions end with the session.
    reads_kept
        Whether first partitions are read from partitions that earlier sessions have kept.
    former
        Id of the open session that this one follows. Workers read their first partitions from its workers.
    carried
        The workers of the session that this one goes on from.
    weights
        Weight of the share of each worker, by address, in rank order. Only these workers train then, with these ranks.
        None if the choices say how large shares are.
    choice
        The workers that may be members, by all names that the client knows of them.
    """

    session_id: str
    client_id: str
    dataset: DatasetReference
    choices: Choices
    deliveries: dict[str, float]
    options: SessionOptions
    settings: Settings
    start: Remainder
    kept_as: str | None = None
    reads_kept: bool = True
    former: str | None = None
    carried: EarlierWorkers | None = None
    weights: Mapping[str, int] | None = None
    choice: WorkerChoice = field(default_factory=WorkerChoice)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A session after ranks were assigned; the same object on every participant.

    Parameters
    ----------
    shuffle
        Everything that plans depend on. If epochs may use different deliveries, it names the one that needs the most
        memory.
    deliveries
        Deliveries that epochs may use.
    options, settings
        Those of the request.
    start
        The first epoch, and what earlier sessions have trained on in it.
    addresses
        Address of every rank, and of the server under :data:`dshuffle.planning.SERVER` if a delivery needs one.
    secret
        Random word that only the participants and the scheduler know. A vote without it is refused.
    kept_as
        The digest of the request.
    former
        Partitions from which the first partitions are read, as far as they have the samples.
    choice
        The workers that may be members.
    memory_limit
        Bytes that one worker has for its partition or the rows of its server, once it has reserved them; None for any
        number.
    """

    session_id: str
    dataset: DatasetReference
    shuffle: ShuffleSpec
    deliveries: tuple[str, ...]
    options: SessionOptions
    settings: Settings
    start: Remainder
    addresses: dict[int, str] = field(default_factory=dict)
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    kept_as: str | None = None
    former: PartitionSources | None = None
    choice: WorkerChoice = field(default_factory=WorkerChoice)
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
        spec = loads(zlib.decompress(packed))
        assert isinstance(spec, SessionSpec)
        return spec

    def with_shuffle(self, shuffle: ShuffleSpec) -> SessionSpec:
        """The same session with another plan specification."""
        return dataclasses.replace(self, shuffle=shuffle)

    def with_former(self, former: PartitionSources) -> SessionSpec:
        """The same session with partitions from which the first partition is read."""
        return dataclasses.replace(self, former=former)

    def with_memory_limit(self, memory_limit: int) -> SessionSpec:
        """The same session on a worker that has reserved so many bytes for it."""
        return dataclasses.replace(self, memory_limit=memory_limit)


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
