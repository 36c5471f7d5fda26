"""The user interface: a :class:`Shuffler` for a Dask client and a dataset."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from distributed import Client, Future, wait
from distributed.protocol.serialize import ToPickle
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, MixingWarning
from dshuffle.notebook import html_summary
from dshuffle.planning import AUTO, SERVER, Assignment, Choices, Classes, GivenSharding, parse_assignment
from dshuffle.planning.cost import Cluster
from dshuffle.records import EpochRecord, Measures
from dshuffle.runtime.cluster_view import check_client
from dshuffle.runtime.collective import CollectiveId
from dshuffle.runtime.dataset_inputs import resolved, wanted_sharding, warn_of_small_classes
from dshuffle.runtime.epoch import Epoch, submit_to_all
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.memory import parse_memory_limit
from dshuffle.runtime.replies import Reply, unwrap
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.session_spec import DatasetReference, SessionRequest, Settings
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, open_dataset
from dshuffle.units import human_count, human_seconds

logger = logging.getLogger(__name__)


class Shuffler:
    """Distribute the samples of a dataset over the workers of a Dask cluster, differently in every epoch.

    Parameters
    ----------
    client
        A synchronous Dask client.
    dataset
        A :class:`Dataset`, or the URL of one that the workers can open.
    assignment
        Rule for which worker trains on which sample. ``"global"``: a new random assignment each epoch. ``"partial:Q"``
        or ``Partial(Q)``: each worker exchanges the fraction Q of its samples. ``"local"``: no exchange. ``"aligned"``:
        a random assignment drawn so that coded deliveries pack well. ``"chunks"``: every chunk of the dataset goes to a
        random worker, which mixes the rows of all its chunks. No chunk is then read twice in an epoch, but the
        assignment is less random. ``"chunks:ROWS"`` uses units of ROWS samples instead of the dataset's chunks.
    delivery
        How a worker gets the samples that it does not hold. ``"peer"``: from the least loaded worker that holds them.
        ``"server"``: from one worker that can read everything. ``"storage"``: read again from the dataset. Coded
        deliveries combine several samples in a packet, from a server that holds all rows: ``"clique"``, ``"coded"``,
        ``"ubershuffle"``, and ``"leftover"`` for caches without excess. ``"auto"`` chooses one for each epoch: first
        the fastest according to the cost model, then according to the measured times of the exchanges.
    caching
        What a worker keeps beyond its share: ``"uniform"``, ``"recent"`` or ``"even"``.
    cache_fraction
        Fraction of the dataset that each worker holds, within [1/n, 1]; ``None`` for its share only.
    relay
        How packets of several samples travel. ``"pipelined"``: from the server to one of their destinations, which
        relays them to the others. ``"ring"``: scattered over the destinations, then passed around. ``"unicast"``: from
        the server to each destination.
    sharding
        The first assignment: ``"random"``, ``"contiguous"`` or ``"round-robin"``. With the assignment ``"chunks"`` it
        applies to whole chunks. With other assignments it may also be ``"stratified:y"`` (each class of the labels
        ``y`` in equal parts), the name of a sharding stored beside the dataset (``dshuffle shard --write``), a
        :class:`~dshuffle.sharding.Sharding`, or ``(q,)`` ranks. Every worker holds the samples that a sharding
        broadcasts and trains on them in every epoch; they are not exchanged. All other samples are trained on exactly
        once per epoch. Give only the ranks of a sharding to ignore its broadcast samples.
    balance
        Name of an array of labels, one integer per sample. In every epoch, including the first, each worker trains on
        the same number of samples of each class, or one more. Works with ``"global"``, ``"partial:Q"`` (all workers
        still exchange the same number of samples) and ``"local"``. The sharding ``"random"`` is then drawn with this
        balance; any other sharding must have it, as ``"stratified:y"`` does.
    seed
        Random seed. Together with the epoch and the workers it determines every random choice.
    first_epoch
        Number of the first epoch, from 0. Workers read their shares of it from the dataset, and train on the samples
        that a session from epoch 0 has in this epoch.
    memory_limit
        Maximum size of a worker's cache partition (``"2 GiB"`` or an integer), including the packets that it relays
        and, on the server, the rows that it serves. By default 60 % of the worker's own memory limit.
    server
        Address or name of the worker that serves, for ``"server"`` and coded deliveries. By default a worker with the
        Dask resource ``dshuffle-server``. This worker does not train. If there is none, rank 0 trains and serves.
    cluster
        Speed of links, storage and processors, for ``"auto"``. By default it is measured, which takes a few seconds.

    Raises
    ------
    InvalidParameter
        If the value of a parameter is not allowed, or there are more workers than samples (or chunks, with
        ``"chunks"``).
    CacheBudgetError
        If a worker's cache partition does not fit. The message says how many bytes or workers would be enough.
    ClusterError
        If there are no workers, or a worker cannot be set up.

    Warns
    -----
    MixingWarning
        If an assignment that moves fewer samples mixes as well.
    ShardingWarning
        If a class of ``balance`` has fewer samples than there are workers, so that some workers do not get any of them.

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
        first_epoch: int = 0,
        memory_limit: int | str | None = None,
        server: str | int | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        check_client(client)
        choices = Choices(
            assignment=parse_assignment(assignment),
            delivery=delivery,
            caching=caching,
            cache_fraction=cache_fraction,
            relay=relay,
            balance=None if balance is None else Classes(balance),
            seed=seed,
        )
        self.records: list[EpochRecord] = []
        self._client = client
        self.dataset = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
        if cluster is not None and delivery != AUTO:
            raise InvalidParameter.of(
                "cluster", cluster, f"None with delivery={delivery!r}", "Only delivery='auto' uses it."
            )
        choices = dataclasses.replace(choices, sharding=wanted_sharding(self.dataset, sharding))
        choices = resolved(self.dataset, choices)
        settings = Settings.from_config()
        server = None if server is None else str(server)
        deliveries = {delivery: 0.0}
        if delivery == AUTO:
            deliveries = expected_seconds(
                client, self.dataset, choices, cluster=cluster, server=server, memory_fraction=settings.memory_fraction
            )
        classes = choices.balance
        if classes is not None:  # labels travel by name
            choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
        self._order = SessionRequest(
            session_id=uuid.uuid4().hex[:12],
            client_id=client.id,
            dataset=DatasetReference.of(self.dataset),
            choices=choices,
            deliveries=deliveries,
            memory_limit=parse_memory_limit(memory_limit),
            server=server,
            settings=settings,
            first_epoch=as_integer("first_epoch", first_epoch, 0),
        )
        self._closed = True  # until the session is open
        self._epoch: Epoch | None = None
        self._next = self._order.first_epoch
        self._collectives = itertools.count(1)
        self._measured: dict[str, Any] = {}
        client.register_plugin(DShuffleScheduler())
        try:
            opened = self._ask("dshuffle_open", order=ToPickle(self._order))
        except KeyboardInterrupt:  # the scheduler does not notice it and would keep the session
            self._ask("dshuffle_close", session_id=self._order.session_id)
            raise
        self._closed = False
        self._addresses: dict[int, str] = dict(opened["addresses"])
        self._server_role: str = opened["server"]
        self.n_workers = sum(who != SERVER for who in self._addresses)
        try:
            if advice := choices.assignment.warning(self.n_workers):
                warnings.warn(advice, MixingWarning, stacklevel=2)
            if classes is not None:
                warn_of_small_classes(classes, self.n_workers)
        except BaseException:  # if warnings are turned into errors
            self.close()
            raise

    @property
    def client(self) -> Client:
        """The Dask client, for trainers that need more than :meth:`Epoch.map`."""
        return self._client

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers that train, in rank order."""
        return tuple(self._addresses[rank] for rank in range(self.n_workers))

    def __repr__(self) -> str:
        state = "closed " if self._closed else ""
        balance = "" if self.choices.balance is None else f", balance={self.choices.balance.name!r}"
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"<{state}Shuffler {self.choices.label}{balance} of {self.dataset.url}; {figures}>"

    def _repr_html_(self) -> str:
        state = "Closed shuffler" if self._closed else "Shuffler"
        chosen = {name: value for name, value in self.choices.to_dict().items() if value not in (None, "")}
        headings = ("epoch", "samples received", "bytes sent", "exchange", "training", "waited")
        rows = [tuple(record._figures().get(name, record.epoch) for name in headings) for record in self.records[-5:]]
        facts = {**chosen, **self._figures()}
        return html_summary(f"{state} of {self.dataset.url}", facts, headings if rows else (), rows)

    def _figures(self) -> dict[str, object]:
        """Numbers of workers and samples, the epoch, and what the last exchange took."""
        figures: dict[str, object] = {"workers": self.n_workers, "samples": human_count(self.dataset.n_samples)}
        if self._epoch is not None:
            figures["epoch"] = self._epoch.number
        if self.records:
            figures["last exchange"] = human_seconds(self.records[-1].exchange_seconds)
        return figures

    @property
    def choices(self) -> Choices:
        """The way of shuffling."""
        return self._order.choices

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._epoch is not None and self._client.status == "running":
            # After an error or Ctrl-C, do not wait for the tasks of this epoch.
            self._client.cancel(self._epoch._futures)
            self._epoch._futures.clear()
        self.close()

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Iterate over the next ``count`` epochs.

        The samples of the next epoch are exchanged during training. Moving on waits for all tasks of the current epoch.
        Another call continues where the previous one ended.

        Parameters
        ----------
        count
            Number of epochs.

        Yields
        ------
        Epoch

        Raises
        ------
        InvalidParameter
            If ``count`` is not an integer of at least 1.
        ExchangeError, WorkerLost
            If an exchange fails, or a worker has left the cluster.
        """
        return self._epochs(as_integer("count", count, 1))

    def close(self) -> None:
        """Free the cache partitions on all workers. Idempotent. The dataset is not changed."""
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
        """Wait for the current epoch's tasks and record it."""
        if self._epoch is None:
            return
        self._wait_for_tasks()
        if self._measured:
            try:
                reply = self._ask("dshuffle_training", session_id=self._order.session_id)
            except DShuffleError as error:
                logger.warning("dshuffle: epoch %d could not be recorded: %s", self._epoch.number, error)
                self._measured = {}
            else:
                self._record(reply["training_seconds"])

    def _wait_for_tasks(self) -> None:
        if self._epoch is None:
            return
        pending = [future for future in self._epoch._futures if not future.done()]
        if pending:
            with self._client.as_current():  # the default would be the client created last
                wait(pending)
        self._epoch._futures.clear()

    def _record(self, training_seconds: list[float]) -> None:
        """Append the record of the epoch that has ended, from the measurements before and during it."""
        measured, self._measured = self._measured, {}
        if not measured:
            return
        choices = dataclasses.replace(self.choices, delivery=measured.pop("delivery"))
        sharding = choices.sharding
        self.records.append(
            EpochRecord(
                choices=choices.by_name(),
                broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
                n_workers=self.n_workers,
                n_samples=self.dataset.n_samples,
                row_nbytes=self.dataset.row_nbytes,
                server=self._server_role,
                first_epoch=self._order.first_epoch,
                training_seconds=max(training_seconds),
                **Measures.from_dict(measured.pop("measures")).to_dict(),
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

    def _new_collective(self) -> CollectiveId:
        return CollectiveId(self._order.session_id, next(self._collectives), self.n_workers, self._addresses[0])

    def _end_collective(self, collective: CollectiveId, reason: str) -> None:
        """Fail all ranks that still wait for a mean of this call."""
        if self._client.status != "running":
            return
        message = {
            "op": "dshuffle_end_collective",
            "session_id": collective.session_id,
            "number": collective.number,
            "reason": reason,
        }

        async def proxy() -> None:
            scheduler: Any = self._client.scheduler
            await scheduler.proxy(worker=collective.address, msg=message)

        try:
            self._client.sync(proxy)
        except OSError as error:  # rank 0's worker is gone, so nobody waits there
            logger.debug("dshuffle: %s could not be told that %s: %s", collective.address, reason, error)

    def _ask(self, op: str, **message: Any) -> Reply:
        if self._client.status != "running":
            raise ClusterError(f"the Dask client is {self._client.status}. Make a new Client and a new Shuffler")

        async def ask() -> Any:
            return await getattr(self._client.scheduler, op)(**message)

        started = time.perf_counter()
        try:
            reply = self._client.sync(ask)
        except OSError as error:
            raise ClusterError(f"the scheduler cannot be reached: {error}") from error
        logger.debug("dshuffle: %s took %.3f s", op, time.perf_counter() - started)
        return unwrap(reply, "the scheduler")
