"""What users hold: a :class:`Shuffler` over a Dask client and a dataset."""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from distributed import Client, Future, wait
from distributed.protocol.serialize import ToPickle
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter
from dshuffle.planning import (
    AUTO,
    CACHINGS,
    DELIVERIES,
    RELAYS,
    SERVER,
    Assignment,
    Classes,
    GivenSharding,
    parse_assignment,
)
from dshuffle.planning.cost import Cluster
from dshuffle.records import EpochRecord
from dshuffle.runtime.cluster_view import check_client
from dshuffle.runtime.collective import Place
from dshuffle.runtime.dataset_inputs import wanted_balance, wanted_sharding, warn_of_small_classes, with_chunks_of
from dshuffle.runtime.epoch import Epoch, submit_to_all
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.memory import parse_memory_limit
from dshuffle.runtime.replies import Reply, unwrap
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.session_spec import DatasetReference, Settings, ShuffleOrder
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, open_dataset

logger = logging.getLogger(__name__)


class Shuffler:
    """Every epoch, another distribution of a dataset's samples over the workers of a Dask cluster.

    Parameters
    ----------
    client
        A synchronous Dask client.
    dataset
        A :class:`Dataset`, or the URL of one that the workers can open.
    assignment
        Which worker trains on which sample: ``"global"`` (a new random partition each epoch), ``"partial:Q"`` or
        ``Partial(Q)`` (each worker exchanges the fraction Q of its samples), ``"local"`` (none). ``"aligned"`` is a
        random partition drawn so that coded deliveries pack well. ``"chunks"`` gives every chunk of the dataset to a
        random worker, which mixes the rows of all its chunks: reading again without reading twice, but less random
        (``"chunks:ROWS"`` for another unit than the dataset's chunks).
    delivery
        How a worker gets the samples that it lacks: ``"peer"`` (from the least loaded worker that holds them),
        ``"server"`` (from one worker that can read everything), ``"storage"`` (read again from the dataset). Coded,
        from a server that holds all rows, several samples to a packet: ``"clique"``, ``"coded"``, ``"ubershuffle"``,
        and ``"leftover"`` for caches without excess. ``"auto"`` takes another one for each epoch: first the one that
        the cost model says is the fastest here, then by what exchanges have really taken.
    caching
        What a worker keeps beyond its share: ``"uniform"``, ``"recent"`` or ``"even"``.
    cache_fraction
        Fraction of the dataset that each worker holds, within [1/n, 1]; ``None`` for its share alone.
    relay
        How packets of several samples travel: ``"pipelined"`` (from the server to one of the workers that they are
        for, which hands them to the others), ``"ring"`` (scattered over these workers, then passed around), or
        ``"unicast"`` (from the server to each of them).
    sharding
        The first assignment: ``"random"``, ``"contiguous"`` or ``"round-robin"``; of whole chunks with the assignment
        ``"chunks"``. With the others also ``"stratified:y"`` (each class of the labels ``y`` in equal parts), the name
        of one stored beside the dataset (``dshuffle shard --write``), a :class:`~dshuffle.sharding.Sharding`, or
        ``(q,)`` ranks. Samples that a sharding broadcasts are held and trained on by every worker in every epoch, and
        have no part in the exchange; that is the one exception to training on each sample exactly once. Give its ranks
        alone for no exception.
    balance
        The name of an array of labels, one integer a sample: in every epoch, the first included, each worker trains on
        equally many samples of each class, or one more. With ``"global"``, ``"partial:Q"`` (every worker still
        exchanges exactly as many samples) and ``"local"``. The sharding ``"random"`` is then drawn so; any other one
        must have that balance, as ``"stratified:y"`` has.
    seed
        Together with the epoch and the workers it fixes every random choice.
    memory_limit
        Bytes that a worker's cache partition may take (``"2 GiB"`` or an integer), with the packets that it hands on,
        and on the server the rows that it serves; by default 60 % of the worker's own memory limit.
    server
        Address or name of the worker that serves, for ``"server"`` and coded deliveries. By default one with the Dask
        resource ``dshuffle-server``; either does not train. Without one, rank 0 serves beside training.
    cluster
        For ``"auto"``: how fast links, storage and processors are. By default that is measured, which takes a few
        seconds.

    Raises
    ------
    InvalidParameter
        If a parameter has a value that is not allowed, or there are fewer samples, or with ``"chunks"`` fewer chunks,
        than workers.
    CacheBudgetError
        If a worker's cache partition does not fit; the message says how many bytes and workers would do.
    ClusterError
        If there are no workers, or one cannot be set up.

    Warns
    -----
    ShardingWarning
        If a class to keep in equal parts has fewer samples than there are workers, some of which then get none of it.

    Examples
    --------
    >>> import numpy as np, dshuffle, tempfile
    >>> from distributed import Client
    >>> def mean(partition):
    ...     return float(partition["x"].mean())
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     Client(n_workers=2, processes=False, dashboard_address=":0") as client,
    ... ):
    ...     dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": np.arange(10.0)})
    ...     with dshuffle.Shuffler(client, dataset) as shuffler:
    ...         for epoch in shuffler.epochs(2):
    ...             print(epoch.number, sum(client.gather(epoch.map(mean))) / 2)
    0 4.5
    1 4.5
    """

    def __init__(
        self,
        client: Client,
        dataset: Dataset | str | os.PathLike[str],
        *,
        assignment: str | Assignment = "global",
        delivery: str = "peer",
        caching: str = "uniform",
        cache_fraction: float | None = None,
        relay: str = "pipelined",
        sharding: str | Sharding | ArrayLike = "random",
        balance: str | None = None,
        seed: int = 0,
        memory_limit: int | str | None = None,
        server: str | int | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        check_client(client)
        for name, value, known in (
            ("delivery", delivery, {*DELIVERIES, AUTO}),
            ("relay", relay, RELAYS),
            ("caching", caching, CACHINGS),
        ):
            if not isinstance(value, str) or value not in known:
                raise InvalidParameter.of(name, value, f"one of {sorted(known)}")
        self.records: list[EpochRecord] = []
        self._client = client
        self.dataset = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
        if cluster is not None and delivery != AUTO:
            raise InvalidParameter.of("cluster", cluster, f"absent with delivery={delivery!r}", "Only 'auto' predicts.")
        settings = Settings.from_config()
        wanted = with_chunks_of(self.dataset, parse_assignment(assignment))
        deliveries = {delivery: 0.0}
        if delivery == AUTO:
            deliveries = expected_seconds(
                client,
                self.dataset,
                cluster,
                assignment=wanted,
                caching=caching,
                cache_fraction=cache_fraction,
                relay=relay,
                server=None if server is None else str(server),
                memory_fraction=settings.memory_fraction,
            )
        self._delivery = delivery
        classes = wanted_balance(self.dataset, balance)
        self._order = ShuffleOrder(
            session_id=uuid.uuid4().hex[:12],
            client_id=client.id,
            dataset=DatasetReference.of(self.dataset),
            assignment=wanted,
            deliveries=deliveries,
            caching=caching,
            sharding=wanted_sharding(self.dataset, sharding),
            cache_fraction=cache_fraction,
            relay=relay,
            balance=None if classes is None else Classes(classes.name, classes.checksum),
            seed=as_integer("seed", seed),
            memory_limit=parse_memory_limit(memory_limit),
            server=None if server is None else str(server),
            settings=settings,
        )
        self._closed = True  # until it is open
        self._epoch: Epoch | None = None
        self._next = 0
        self._meetings = itertools.count(1)
        self._measured: dict[str, Any] = {}
        client.register_plugin(DShuffleScheduler())
        try:
            opened = self._ask("dshuffle_open", order=ToPickle(self._order))
        except KeyboardInterrupt:  # the scheduler does not know of it, and would keep the session
            self._ask("dshuffle_close", session_id=self._order.session_id)
            raise
        self._closed = False
        self._addresses: dict[int, str] = dict(opened["addresses"])
        self._server_role: str = opened["server"]
        self.n_workers = sum(who != SERVER for who in self._addresses)
        if classes is not None:
            try:
                warn_of_small_classes(classes, self.n_workers)
            except BaseException:  # where warnings are errors
                self.close()
                raise

    @property
    def client(self) -> Client:
        """The Dask client, for what trainers run beside :meth:`Epoch.map`."""
        return self._client

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the workers that train, in rank order."""
        return tuple(self._addresses[rank] for rank in range(self.n_workers))

    def __repr__(self) -> str:
        order = self._order
        balance = "" if order.balance is None else f", balance={order.balance.name!r},"
        return f"<Shuffler {order.assignment} x {self._delivery}{balance} of {self.dataset.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._epoch is not None and self._client.status == "running":
            # Whoever leaves by an error, or by Ctrl-C, does not want to wait for the tasks of this epoch.
            self._client.cancel(self._epoch._futures)
            self._epoch._futures.clear()
        self.close()

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The next ``count`` epochs, one after the other.

        While an epoch is trained on, the next one's samples are exchanged. Moving on waits for all tasks of the
        present epoch. The epochs of a second call go on where those of the first ended.

        Parameters
        ----------
        count
            Epochs to go through.

        Yields
        ------
        Epoch

        Raises
        ------
        InvalidParameter
            If ``count`` is not an integer of at least 1.
        ExchangeError, WorkerLost
            If an exchange fails for good, or a worker has left the cluster.
        """
        return self._epochs(as_integer("count", count, 1))

    def close(self) -> None:
        """Free the cache partitions on all workers. Idempotent; the dataset is untouched."""
        if self._closed:
            return
        try:
            self._finish_epoch()
        finally:
            self._closed = True
            if self._client.status == "running":
                self._ask("dshuffle_close", session_id=self._order.session_id)

    def _epochs(self, count: int) -> Iterator[Epoch]:
        for left in reversed(range(count)):
            self._wait_for_tasks()
            reply = self._ask("dshuffle_advance", session_id=self._order.session_id, epoch=self._next)["epoch"]
            self._next += 1
            self._record(reply.pop("training_seconds_before"))
            self._measured = reply
            self._epoch = Epoch(self, reply["epoch"])
            if left:
                self._ask("dshuffle_prefetch", session_id=self._order.session_id)
            yield self._epoch
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        """Wait for the present epoch's tasks and record it."""
        if self._epoch is None:
            return
        self._wait_for_tasks()
        if self._measured:
            try:
                reply = self._ask("dshuffle_training", session_id=self._order.session_id)
            except DShuffleError as error:
                logger.warning("dshuffle: no record of epoch %d: %s", self._epoch.number, error)
                self._measured = {}
            else:
                self._record(reply["training_seconds"])

    def _wait_for_tasks(self) -> None:
        if self._epoch is None:
            return
        pending = [future for future in self._epoch._futures if not future.done()]
        if pending:
            with self._client.as_current():  # not whichever client was made last
                wait(pending)
        self._epoch._futures.clear()

    def _record(self, training_seconds: list[float]) -> None:
        """Put the record of the epoch that has ended together from what was measured before and during it."""
        measured, self._measured = self._measured, {}
        if not measured:
            return
        order = self._order
        n_samples, row_nbytes = self.dataset.n_samples, self.dataset.row_nbytes
        for name in ("wire_sent_bytes", "wire_received_bytes"):
            measured[name] = tuple(measured[name])
        self.records.append(
            EpochRecord(
                assignment=str(order.assignment),
                caching=order.caching,
                sharding=str(order.sharding),
                broadcast_samples=order.sharding.n_broadcast if isinstance(order.sharding, GivenSharding) else 0,
                balance="" if order.balance is None else order.balance.name,
                n_workers=self.n_workers,
                n_samples=n_samples,
                row_nbytes=row_nbytes,
                cache_fraction=order.cache_fraction if order.cache_fraction is not None else 1 / self.n_workers,
                coded_load_bytes=measured["packets"] * row_nbytes if measured["epoch"] else 0,
                server=self._server_role,
                training_seconds=max(training_seconds),
                **measured,
            )
        )

    def _submit(
        self, epoch: Epoch, call: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Future[Any]]:
        if self._closed or epoch is not self._epoch:
            now = "closed" if self._closed else f"on epoch {self._epoch.number if self._epoch else -1}"
            raise ClusterError(f"epoch {epoch.number} has ended; its shuffler is {now}")
        session_id = self._order.session_id
        futures = submit_to_all(self._client, self.addresses, session_id, epoch.number, call, fn, args, kwargs)
        epoch._futures.extend(futures)
        return futures

    def _new_meeting(self) -> Place:
        return Place(self._order.session_id, next(self._meetings), self.n_workers, self._addresses[0])

    def _disband(self, place: Place, reason: str) -> None:
        """Let no rank wait any longer for one that has failed."""
        if self._client.status != "running":
            return
        message = {"op": "dshuffle_disband", "session_id": place.session_id, "number": place.number, "reason": reason}

        async def proxy() -> None:
            scheduler: Any = self._client.scheduler
            await scheduler.proxy(worker=place.address, msg=message)

        try:
            self._client.sync(proxy)
        except OSError as error:  # nobody can wait there
            logger.debug("dshuffle: %s could not be told that %s: %s", place.address, reason, error)

    def _ask(self, op: str, **message: Any) -> Reply:
        if self._client.status != "running":
            raise ClusterError(f"the Dask client is {self._client.status}; this shuffler cannot go on")

        async def ask() -> Any:
            return await getattr(self._client.scheduler, op)(**message)

        started = time.perf_counter()
        try:
            reply = self._client.sync(ask)
        except OSError as error:
            raise ClusterError(f"the scheduler cannot be reached: {error}") from error
        logger.debug("dshuffle: %s took %.3f s", op, time.perf_counter() - started)
        return unwrap(reply, "the scheduler")
