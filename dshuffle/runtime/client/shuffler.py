"""The user interface: a :class:`Shuffler` for a Dask client and a dataset, again after losses, and a view of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from html import escape
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from distributed import Client, KilledWorker
from distributed.comm.core import CommClosedError
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import ClusterError, DShuffleError, MixingWarning, PeerFailed, WorkerLost, what_happened
from dshuffle.notebook import html_summary
from dshuffle.planning import Assignment, Choices, Classes, GivenSharding, Remainder
from dshuffle.planning.cost import ClusterRates, as_number
from dshuffle.planning.shares import Shares
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.runtime.client.checkpoints import (
    CHOICES,
    Checkpoint,
    SessionPosition,
    SessionState,
    shuffle_digest,
)
from dshuffle.runtime.client.cluster_view import check_client, is_adaptive, keep_nannies, wait_for_workers
from dshuffle.runtime.client.epoch import Epoch, EpochTasks
from dshuffle.runtime.client.session_client import (
    PATIENCE,
    Membership,
    OpenSession,
    install_plugin,
    session_request,
)
from dshuffle.runtime.dataset_inputs import checked_sharding, resolved, warn_of_small_classes
from dshuffle.runtime.measure.measurement import expected_seconds
from dshuffle.runtime.messages import EpochExchange, TrainedSamples, TrainingTime
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot
from dshuffle.runtime.session_spec import OPTION_NAMES, EarlierWorkers, SessionOptions, WorkerChoice
from dshuffle.runtime.settings import Settings, as_seconds
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, Place, as_dataset
from dshuffle.units import human_count

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEASURED = ("epoch", "run_id", "needed", "packets", "components", "exchange_seconds", "waited_seconds")
"""Fields of an exchange that are in the record of its epoch."""

LOSSES = (CommClosedError, KilledWorker, CancelledError)
"""Dask's errors after which another session may succeed. Those of dshuffle say it themselves."""

SHORTEST = 0.1
"""Least seconds between two looks."""

LINE_EVERY = 5.0
"""Least seconds between two lines of text about the same phase. How far each worker is changes at every look."""

STOP_WITHIN = 5.0
"""Seconds that a widget that is stopped waits for its last look."""


class Shuffler:
    """Distribute the samples of a dataset over the workers of a Dask cluster, differently in every epoch.

    Parameters
    ----------
    client
        A synchronous Dask client.
    dataset
        A :class:`Dataset`, or the URL or the Zarr store of one that the workers can open.
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
        ``y`` in equal parts), the name of a sharding stored beside the dataset (``dshuffle.store.write_sharding``), a
        :class:`~dshuffle.sharding.Sharding`, or ``(q,)`` ranks. Every worker holds the samples that a sharding
        broadcasts and trains on them in every epoch; they are not exchanged. All other samples are trained on exactly
        once per epoch. Give only the ranks of a sharding to ignore its broadcast samples.
    balance
        Name of an array of labels, one integer per sample. In every epoch, including the first, each worker trains on
        the same number of samples of each class, or one more. Works with ``"global"`` and ``"local"``, and with the
        shardings ``"random"``, which is then drawn with this balance, and ``"stratified:y"`` of the same labels.
    every
        K: only the epochs K, 2 K, ... have an exchange. In the epochs between, each worker trains on the samples
        that it has. So an epoch moves a K-th of the bytes on average. See docs/strategies.md.
    between
        The order in the epochs between: ``"redraw"``, a new random one, or ``"reverse"``, that of the epoch before,
        backwards.
    seed
        Random seed. Together with the epoch, the workers and their shares it determines every random choice.
    shares
        How many samples each worker trains on. ``"even"``: equally many. Positive numbers, one for each rank, or by
        the name or address of workers (``{"old-node": 0.5}``; the others have 1): in proportion to them.
        ``"measured"``: in proportion to the samples per second with which each rank has trained, measured in the epochs
        before. Shares then change at most every few epochs, and only where that saves a tenth of the time of an epoch.
        Ranks follow the names of the workers, host by host, and not the order of ``workers``. See
        docs/unequal-workers.md.
    first_epoch
        Number of the first epoch, from 0. Workers read their shares of it from the dataset, and train on the samples
        that a session from epoch 0 has in this epoch.
    on_loss
        What happens when a worker is lost. ``"replace"``: another worker takes the rank, for instance one that a nanny
        starts. It reads the partition again, and lost tasks of the current epoch run again there. If no worker can, or
        none does within ``dshuffle.replacement-timeout``, the session ends with :class:`WorkerLost`. ``"raise"``: it
        ends at once. An elastic session then opens the epoch again with the workers that are left. A new session reads
        the partitions of one that was lost. See docs/faults.md. If nobody can replace a worker that only serves, peers
        send the rows.
    checkpoint
        File or object (a path, or a URL such as ``s3://bucket/run.json``) to which the state is written: when the
        session opens, at the start of every epoch, and after the last one. The dataset's storage options are used if it
        is in the same store. If there is a checkpoint already, it must be resumed (:meth:`resume`,
        :func:`dshuffle.run_with_retries`) or removed. Only one open session may have a file as its checkpoint, which
        only its user can read.
    memory_limit
        Maximum size of a worker's cache partition (``"2 GiB"`` or an integer), including the packets that it relays
        and, on the server, the rows that it serves. By default 60 % of the worker's own memory limit.
    cache_directory
        Folder on a local disk of every worker (an absolute path), for partitions that are larger than memory;
        ``"local"`` for the ``local_directory`` of each Dask worker. Rows are then in a file without a name, and only
        their index counts as memory. See docs/settings.md.
    keep_cache
        Whether the partitions in ``cache_directory`` outlive the session. A later session on the same dataset, with the
        same way of shuffling and seed, reads its first partitions from those that it finds there. It removes them when
        it has partitions of its own.
    server
        Address or name of the worker that serves, for ``"server"`` and coded deliveries. By default a worker with the
        Dask resource ``dshuffle-server``. This worker does not train. If there is none, rank 0 trains and serves.
    workers
        Addresses or names of the workers that train. By default all workers of the cluster. Other workers neither join
        the session nor replace lost ones. A worker that its nanny starts again is still the same. An elastic session
        opens with those that are there.
    resources
        Dask resources that a worker must have to train, such as ``{"GPU": 1}``. They say who trains, and are not used
        up.
    cluster
        Speed of links, storage and processors, for ``"auto"``. By default it is measured, which takes a few seconds.
    elastic
        Whether the workers may change between epochs. Workers that join the cluster take part from the next epoch on,
        or from the one after it, and members that Dask retires hand over their samples. See docs/resuming.md.
    min_workers
        Number of workers to wait for, up to ``dshuffle.timeout``, before the session opens. An elastic session does not
        go on with fewer.

    Attributes
    ----------
    client, dataset
        The Dask client, and the dataset.
    choices
        The way of shuffling.
    elastic
        Whether the number of workers may change.
    next_epoch
        Number of the epoch that comes next. For a session that continues another one, it counts all epochs.
    records
        Measurements of the epochs that have ended, as a list of :class:`EpochRecord`. The current epoch is recorded
        when the next one begins.
    closed
        Whether :meth:`close` was called.

    Raises
    ------
    InvalidParameter
        If the value of a parameter is not allowed, or there are more workers than samples (or chunks, with
        ``"chunks"``), or no worker has a name in ``workers``.
    CacheBudgetError
        If a worker's cache partition does not fit. The message says how many bytes or workers would be enough.
    CheckpointError
        If the checkpoint is there already, belongs to another open session, or cannot be written.
    ClusterError
        If there are no workers, none of them has the ``resources``, or a worker cannot be set up.

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
        dataset: Dataset | Place,
        *,
        assignment: str | Assignment = "global",
        delivery: str = "peer",
        caching: str = "uniform",
        cache_fraction: float | None = None,
        relay: str = "pipelined",
        sharding: str | Sharding | ArrayLike = "random",
        balance: str | None = None,
        every: int = 1,
        between: str = "redraw",
        seed: int = 0,
        shares: Shares = "even",
        first_epoch: int = 0,
        on_loss: str = "replace",
        checkpoint: str | os.PathLike[str] | None = None,
        memory_limit: int | str | None = None,
        cache_directory: str | os.PathLike[str] | None = None,
        keep_cache: bool = False,
        server: str | int | None = None,
        workers: Sequence[str | int] | None = None,
        resources: Mapping[str, float] | None = None,
        cluster: ClusterRates | None = None,
        elastic: bool = False,
        min_workers: int = 1,
        _resumed: tuple[SessionState, Checkpoint | None] | None = None,
    ) -> None:
        keywords = locals()
        check_client(client)
        options = SessionOptions(**{name: keywords[name] for name in OPTION_NAMES})
        keywords["balance"] = None if balance is None else Classes(balance)
        choices = Choices(**{name: keywords[name] for name in CHOICES - {"sharding"}})
        self.client, self.dataset = client, as_dataset(dataset)
        choices = dataclasses.replace(choices, sharding=checked_sharding(self.dataset, sharding))
        choices = resolved(self.dataset, choices)
        options.check_way(choices)
        start, carried = Remainder(as_integer("first_epoch", first_epoch, 0), ()), None
        earlier: SessionState | None
        self._file: Checkpoint | None
        earlier, self._file = _resumed or (None, None)
        if earlier is not None:
            start, carried = earlier.next, EarlierWorkers.of(earlier.history, earlier.next)
        settings = Settings.from_config(adaptive=is_adaptive(client))
        check_emulated_rates()  # those of this process, which reads rows as well
        with contextlib.ExitStack() as on_error:
            if self._file is None and checkpoint is not None:
                self._file = Checkpoint(checkpoint, self.dataset)
                self._file.lock()
            if self._file is not None:
                on_error.callback(self._file.release)
                if earlier is None:
                    self._file.check_empty()
            keep_nannies(client)
            install_plugin(client)
            if options.min_workers > 1:
                limit, choice = "dshuffle.timeout", options.choice
                wait_for_workers(client, options.min_workers, settings.timeout, limit=limit, choice=choice)
            deliveries = {choices.delivery: 0.0}
            if choices.is_auto:
                fraction = settings.memory_fraction
                deliveries = expected_seconds(client, self.dataset, choices, options, memory_fraction=fraction)
            classes = choices.balance
            if classes is not None:
                choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
            self.choices = choices
            kept_as = shuffle_digest(self.dataset, choices) if options.keep_cache else None
            others = {"deliveries": deliveries, "start": start, "kept_as": kept_as, "carried": carried}
            request = session_request(client, self.dataset, choices, options, settings, **others)
            session = OpenSession(client, request)
            self._membership = Membership(session)
            on_error.callback(self._membership.close)
            if advice := choices.assignment.warning(session.n_workers):
                warnings.warn(advice, MixingWarning, stacklevel=2)
            if classes is not None:
                warn_of_small_classes(classes, session.n_workers, stacklevel=2)
            attached = None if earlier is None else earlier.attached
            state = SessionState.of(self.dataset, choices, session.history, start, attached)
            self._position, self.next_epoch = SessionPosition(state), start.epoch
            self._write_checkpoint()  # one that cannot be written is refused now
            on_error.pop_all()
        self.records: list[EpochRecord] = []
        self._record: EpochRecord | None = None  # of the current epoch, without its training
        self._requested_at = 0.0  # when the client asked for the current epoch
        self._handed_out = True  # whether the current epoch has been yielded
        self._watches = False
        self.elastic, self.closed = options.elastic, False

    @classmethod
    def resume(
        cls,
        client: Client,
        dataset: Dataset | Place,
        state: Mapping[str, Any] | str | os.PathLike[str],
        **options: Any,
    ) -> Self:
        """Continue an earlier session, with any number of workers. See docs/resuming.md.

        Parameters
        ----------
        client, dataset
            As for :class:`Shuffler`. The dataset must be the same.
        state
            What :meth:`state_dict` returned, or the place of a checkpoint, which is then also the default of
            ``checkpoint``.
        **options
            Other parameters of :class:`Shuffler`, but for those that choose the samples, which come from the state. A
            ``sharding`` that was an array must be given again.

        Raises
        ------
        CheckpointError
            If the state is damaged, or one of another dataset or of a release that draws other samples.
        InvalidParameter
            If an option contradicts the state.

        Examples
        --------
        >>> import numpy as np, dshuffle
        >>> from distributed import Client
        >>> dataset = dshuffle.create_dataset("memory://doc-resume", {"x": np.arange(10.0)}, overwrite=True)
        >>> def some(partition):
        ...     partition.mark_trained(2)
        >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        ...     with dshuffle.Shuffler(client, dataset) as shuffler:
        ...         _ = client.gather(next(shuffler.epochs(1)).map(some))
        ...         state = shuffler.state_dict()
        ...     with dshuffle.Shuffler.resume(client, dataset, state) as shuffler:
        ...         [client.gather(epoch.map(len)) for epoch in shuffler.epochs(2)]
        [[3, 3], [5, 5]]
        """
        dataset, file = as_dataset(dataset), None
        with contextlib.ExitStack() as on_error:
            if not isinstance(state, Mapping):
                saved, target = Checkpoint(state, dataset), options.setdefault("checkpoint", state)
                if target is not None and Checkpoint(target, dataset).place == saved.place:
                    # Before it is read: a session that is still open may be about to write it.
                    file = saved
                    on_error.callback(file.release)
                    file.lock(must_exist=True)
                state = saved.read_state()
            earlier = SessionState.from_dict(state, dataset)
            resumed = cls(client, dataset, **earlier.keywords(dataset, options), _resumed=(earlier, file))
            on_error.pop_all()
        return resumed

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this session, for :meth:`resume`. It can be written as JSON.

        Returns
        -------
        dict
            The identity of the dataset, the way of shuffling, the epoch, and how many of its samples each rank has
            trained on, as far as tasks say so (:meth:`Partition.mark_trained`, ``Partition.batches(mark=True)``). A
            rank whose worker was lost counts 0, because its task runs again.

        Raises
        ------
        ClusterError
            If the session has ended, or a worker does not answer.
        """
        if self.closed:
            raise ClusterError("this Shuffler is closed. Take its state before", transient=False)
        position = self._position
        if position.tasks is not None and not position.ended:
            try:
                trained = self._calls.ask(TrainedSamples, "trained")
            except WorkerLost:
                position.tasks.interrupted = True  # calls that the loop has not made yet are missing
                raise
            if trained.epoch == self.epoch:
                return position.state(trained.counts, trained.digest)
        return position.state()

    def save(self, url: str | os.PathLike[str]) -> None:
        """Write the state of this session to a checkpoint.

        Raises
        ------
        CheckpointError
            If it cannot be written. An earlier checkpoint is still there.
        """
        Checkpoint(url, self.dataset).write(self.state_dict())

    def attach(self, value: Any, epoch: int | None = None) -> None:
        """Keep a value in the states and checkpoints of this session from now on, such as a model after an epoch.

        A state says that the epochs are done whose results the value has, and not more. So a session that resumes
        trains again on what is not in the value.

        Parameters
        ----------
        value
            Any object that can be pickled. It is pickled at once, and replaces the value that was attached before.
        epoch
            The last epoch whose results the value has. By default the current one, or the one before if no call of
            :meth:`Epoch.map` has ended in the current one. Give it if results are gathered later than in their epoch,
            or if a value is not attached in every epoch.

        Raises
        ------
        CheckpointError
            If the value cannot be pickled.
        InvalidParameter
            If ``epoch`` has not begun, or is not given although nothing was attached in an epoch before.
        """
        self._position.attach(value, epoch)
        if self._position.ended and not self.closed:  # after the last epoch, the checkpoint has it at once
            self._write_checkpoint()

    @property
    def checkpoint(self) -> str | os.PathLike[str] | None:
        """Where a checkpoint is written in every epoch, if anywhere."""
        return None if self._file is None else self._file.url

    @property
    def attached(self) -> Any:
        """The value that was attached, in this session or in the one that it continues; None without one.

        It was pickled. So continue only states and checkpoints that you trust.
        """
        return self._position.attached

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers that train, in rank order."""
        return self._calls.ranks

    @property
    def n_workers(self) -> int:
        """Number of workers that train in the current epoch. It changes if the session is elastic."""
        return self._calls.n_workers

    @property
    def epoch(self) -> int | None:
        """Number of the current epoch; None before the first one."""
        return None if self._position.tasks is None else self._position.tasks.epoch

    def __repr__(self) -> str:
        balance = "" if self.choices.balance is None else f", balance={self.choices.balance.name!r}"
        figures = f"workers {self.n_workers}, samples {human_count(self.dataset.n_samples)}"
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        state = "closed " if self.closed else ""
        return f"<{state}Shuffler {self.choices.label}{balance} of {hide_secrets(self.dataset.url)}; {figures}{epoch}>"

    def _repr_html_(self) -> str:
        return html_summary(repr(self), {name: value for name, value in self.choices.to_dict().items() if value})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        elif not self._calls.forked:  # else the session belongs to another process, and this error is more important
            # Without waiting for the tasks of this epoch, and without another error.
            if (tasks := self._position.tasks) is not None:
                if self._calls.connected:
                    self.client.cancel(tasks.futures)
                tasks.calls.clear()
            try:
                self._close()
            except DShuffleError as second:
                logger.warning("dshuffle: after %s, closing failed: %s", type(error).__name__, second)

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self._calls.connected:
            self.closed = True
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self._membership.close_soon()
            self._leave_checkpoint()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled: it owns an open session, and the connections of a Dask client in "
            "this process. Pass the object itself to other functions. In another process, make a new one, or use "
            "Epoch.map to run functions on the workers"
        )

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Iterate over the next ``count`` epochs.

        The samples of the next epoch are exchanged during training. Moving on waits for all tasks of the current epoch.
        If a task failed, was cancelled or was lost with its worker, moving on raises an error, unless you have called
        :meth:`Epoch.accept`. Another call continues where the previous one ended.

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
            If ``count`` is not an integer of at least 0.
        ExchangeError, WorkerLost
            If an exchange fails, or a worker is lost and no other worker takes its rank.
        ClusterError
            If tasks of the current epoch were cancelled. The error of a task that failed is raised as it is.
        """
        count = as_integer("count", count, 0)
        if self.closed:
            raise ClusterError("this Shuffler is closed. Make a new one", transient=False)
        self._calls.check_process()
        return self._epochs(count)

    def _epochs(self, left: int) -> Iterator[Epoch]:
        position = self._position
        while True:
            is_again = False
            if self._handed_out or not left:
                is_again = self._is_reopened(self._end_tasks if left else self._finish_epoch)
                if not (left or is_again):
                    break
                if not is_again:
                    requested_at, position.ended = time.perf_counter(), True
                    exchange = self._membership.advance(self.next_epoch, self.records)
                    self.next_epoch += 1
                    self._begin(exchange, requested_at)
            left -= not is_again
            assert position.tasks is not None
            if left:
                self._membership.prefetch(self.next_epoch, self.records)
            self._write_checkpoint()
            self._handed_out = True  # not before: Ctrl-C in a call must not lose the epoch
            yield Epoch(self, self._calls, position.tasks)
        if position.tasks is not None and position.tasks.n_calls:
            position.ended = True
        # else the epoch is still to be trained on: ``epoch = list(shuffler.epochs(1))[0]``
        self._write_checkpoint()

    def _is_reopened(self, end: Callable[[], None]) -> bool:
        """Let the tasks end; whether the epoch is opened again, because some were lost, and others can go on."""
        position, tasks = self._position, self._position.tasks
        try:
            end()
            if tasks is None or not (tasks.interrupted and self._membership.is_lost()):
                return False
        except (WorkerLost, PeerFailed):
            if tasks is None or not self._membership.is_lost():
                raise
        start, requested_at = position.left(), time.perf_counter()
        if start.epoch > tasks.epoch:  # all samples were trained on, according to the last state
            tasks.calls.clear()
            return False
        self._begin(self._membership.reopen(start), requested_at, start)
        return True

    def _begin(self, exchange: EpochExchange, requested_at: float, left: Remainder | None = None) -> None:
        """Make an epoch the current one, and begin its record."""
        if self._position.tasks is not None:
            self._position.tasks.over = True
        session = self._calls
        self._position.begin(EpochTasks(exchange.epoch), session.history, left)
        self._handed_out = False  # at once: Ctrl-C must not skip the epoch
        self._end_record(exchange.training_before, requested_at)
        start, sharding = session.request.start, self.choices.sharding
        self._requested_at = requested_at
        self._record = EpochRecord(
            choices=dataclasses.replace(self.choices, delivery=exchange.delivery).by_name(),
            n_workers=session.n_workers,
            n_samples=self.dataset.n_samples,
            row_nbytes=self.dataset.row_nbytes,
            server=session.server,
            training_seconds=0.0,
            broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
            first_epoch=start.epoch,
            trained_before=start.total if start.epoch == exchange.epoch else 0,
            weights=session.history.weights,
            **{name: getattr(exchange, name) for name in MEASURED},
            **exchange.measures.to_dict(),
        )
        if not self._watches:
            self._watches = True
            loop: Any = self.client.loop
            loop.add_callback(_watch, weakref.ref(self))

    def _end_record(self, training: Sequence[TrainingTime] | None, ended: float) -> None:
        """Keep the record of the current epoch, if the times of its training are known."""
        record, self._record = self._record, None
        if record is not None and training is not None:
            ended_record = dataclasses.replace(
                record,
                training_seconds=max(rank.seconds for rank in training),
                rank_training_seconds=tuple(rank.own for rank in training),
                epoch_seconds=ended - self._requested_at,
            )
            self.records.append(ended_record)

    def _finish_epoch(self) -> None:
        try:
            self._end_tasks()
        finally:
            ended = time.perf_counter()
            if self._record is not None:
                self._end_record(self._membership.training(self._record.epoch + 1), ended)

    def _end_tasks(self) -> None:
        if self._position.tasks is not None:
            self._calls.check_process()
            self._position.tasks.end(self._calls)

    def _write_checkpoint(self) -> None:
        """Write the state to the checkpoint, if there is one."""
        # Nothing was trained on since the last epoch began or ended, so no worker is asked.
        if self._file is not None:
            self._file.write(self._position.state())

    def _leave_checkpoint(self) -> None:
        if self._file is not None:
            self._file.release()

    def accept(self) -> None:
        """Let the current epoch end although tasks did not finish. See :meth:`Epoch.accept`."""
        if self._position.tasks is not None:
            self._position.tasks.accept(None)

    def close(self) -> None:
        """Free the cache partitions on all workers. Idempotent. The dataset is not changed.

        Waits for the tasks of the current epoch. The log says if some of them did not finish.

        Raises
        ------
        ClusterError
            If the scheduler does not report within 5 s how the tasks ended (20 s while ``close`` waits for them). If it
            stops answering after that, this is only logged.
        """
        try:
            self._close()
        except Exception as error:
            tasks = self._position.tasks
            if tasks is None or tasks.error is not error:
                raise
            notes = "; ".join(getattr(error, "__notes__", []))
            logger.warning("dshuffle: %s: %s (%s)", type(error).__name__, error, notes)

    def _close(self) -> None:
        """End the current epoch, close the sessions, and leave the checkpoint to others."""
        if self.closed:
            return
        self._calls.check_process()
        self._calls.silence.leaving = True
        tasks = self._position.tasks
        try:
            if tasks is not None and tasks.error is None:  # else it was raised before
                self._finish_epoch()
        finally:
            self.closed = True
            if tasks is not None:
                tasks.over = True
            try:
                self._membership.close()
            finally:
                self._leave_checkpoint()

    def look_up_members(self) -> bool:
        """Ask the scheduler for :attr:`addresses`; whether ranks have other workers than at the last look."""
        return self._calls.look_up_members()

    @property
    def _choice(self) -> WorkerChoice:
        return self._calls.request.choice

    @property
    def _calls(self) -> OpenSession:
        return self._membership.current


async def _watch(watched: weakref.ref[Shuffler]) -> None:
    """Say what tasks wait for after some seconds, and twice that time, and so on, also while the user gathers."""
    said = 0.0
    while (shuffler := watched()) is not None and not shuffler.closed and shuffler._calls.connected:
        session, tasks = shuffler._calls, shuffler._position.tasks
        waits = tasks is not None and not all(future.done() for future in tasks.futures)
        seconds = time.monotonic() - tasks.called_at if waits and tasks is not None else 0.0
        del shuffler, tasks
        if seconds < PATIENCE:
            said = 0.0
        elif seconds >= 2 * said:
            said = seconds
            await session.say_why_now(tasks=True)
        del session
        await asyncio.sleep(PATIENCE / 3)


def run_with_retries(
    train: Callable[[Shuffler], T],
    make_client: Callable[[], Client | AbstractContextManager[Client]],
    dataset: Dataset | Place,
    *,
    checkpoint: str | os.PathLike[str],
    attempts: int = 3,
    min_workers: int = 1,
    patience: str | float = "5m",
    **options: Any,
) -> T:
    """Train with a :class:`Shuffler`, and again from its checkpoint if the session or the cluster is lost.

    If there is a checkpoint from the beginning, training goes on from it. So a job script that a queue starts again
    needs nothing but this call.

    Parameters
    ----------
    train
        Function that trains, and returns when training is done. It is called with a new shuffler in every attempt.
    make_client
        Function that returns a Dask client, or a context manager that yields one; called before every attempt. A client
        stays open, and may be the same every time. A context manager is left after the attempt, so that a cluster that
        it has started is closed before another one is started.
    dataset
        A dataset, or the URL of one.
    checkpoint
        File or object of the state, as for :class:`Shuffler`.
    attempts
        Attempts in a row that may fail without progress of training. There is progress if the checkpoint says that an
        epoch has ended, or that more of its samples were trained on (:meth:`Shuffler.save`). An error that another
        attempt cannot help (:attr:`DShuffleError.transient`) is raised at once.
    min_workers
        Number of workers to wait for before an attempt. A session has as many workers as there are when it opens. With
        the option ``elastic``, their number may change later.
    patience
        Time to wait for them, and for a checkpoint that cannot be read for the moment: seconds, or text such as
        ``"5m"``.
    **options
        Other parameters of :class:`Shuffler`.

    Returns
    -------
    object
        What ``train`` returned.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, one of another dataset, or cannot be read or written in time.
    InvalidParameter
        If an option contradicts the checkpoint.
    ClusterError, ExchangeError
        If the last attempt failed as well, or there were not enough workers in time.
    DShuffleError
        If another attempt cannot help.

    Examples
    --------
    >>> import numpy as np, dshuffle, tempfile
    >>> from distributed import Client
    >>> dataset = dshuffle.create_dataset("memory://doc-retries", {"x": np.arange(10.0)}, overwrite=True)
    >>> tries = iter([True, False])
    >>> def train(shuffler):
    ...     for epoch in shuffler.epochs(3 - shuffler.next_epoch):
    ...         if epoch.number == 1 and next(tries):
    ...             raise dshuffle.ClusterError("the cluster is gone")
    ...     return epoch.number
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     dshuffle.run_with_retries(train, lambda: client, dataset, checkpoint="memory://doc-retries-state/run.json")
    2
    """
    as_integer("attempts", attempts, 1)
    options["min_workers"] = as_integer("min_workers", min_workers, 1)
    chosen = SessionOptions(**{name: options[name] for name in OPTION_NAMES & options.keys()})
    opened, seconds = as_dataset(dataset), as_seconds("patience", patience)
    saved = Checkpoint(checkpoint, opened)

    def progress() -> tuple[int, int]:
        """The first epoch that has not ended, and how many of its samples were trained on."""
        if (state := saved.read(seconds)) is None:
            return options.get("first_epoch", 0), 0
        saved.was_used = True  # so that it is only away for a moment if it cannot be read later
        remainder = SessionState.from_dict(state, opened).next
        return remainder.epoch, remainder.total

    reached, in_a_row = progress(), 0
    while True:
        try:
            with contextlib.ExitStack() as attempt:
                made = make_client()  # a client of the user stays open
                client = made if isinstance(made, Client) else attempt.enter_context(made)
                wait_for_workers(client, chosen.awaited_workers, seconds, choice=chosen.choice)
                shuffler = new_or_resumed(client, opened, checkpoint, saved.read(seconds), options)
                saved.was_used = True
                return train(attempt.enter_context(shuffler))
        except (DShuffleError, *LOSSES) as error:
            if isinstance(error, DShuffleError) and not error.transient:
                raise
            before, reached = reached, max(reached, progress())
            in_a_row = 0 if reached > before else in_a_row + 1
            if in_a_row >= attempts:
                raise
            text = "dshuffle: training continues in epoch %d (%s: %s)"
            logger.warning(text, reached[0], type(error).__name__, what_happened(error))


def new_or_resumed(
    client: Client,
    dataset: Dataset,
    checkpoint: str | os.PathLike[str],
    state: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Shuffler:
    """Open a new session, or one that goes on from its checkpoint if there is a ``state`` in it."""
    if state is None:
        return Shuffler(client, dataset, checkpoint=checkpoint, **options)
    later = {name: value for name, value in options.items() if name != "first_epoch"}
    return Shuffler.resume(client, dataset, checkpoint, **later)


class SessionWidget:
    """A live view of a session, which ends when the session is closed; see :func:`watch`."""

    def __init__(self, shuffler: Shuffler, seconds: float) -> None:
        self._shuffler = weakref.ref(shuffler)  # a shuffler that is dropped closes its session
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        in_notebook = getattr(shell, "kernel", None) is not None  # where output can be replaced
        self._display = importlib.import_module("IPython.display") if in_notebook else None
        self._handle: Any = self._display.display(display_id=True) if self._display else None
        self._phase, self._details, self._written = "", "", 0.0  # of the last line of text
        self._stopped = threading.Event()
        self._update(shuffler)
        self._thread = threading.Thread(target=self._look, args=(seconds,), name="dshuffle-watch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else "watches"
        return f"<SessionWidget {state} {self._shuffler() or 'a shuffler that is gone'}>"

    def stop(self) -> None:
        """Stop looking. What was shown last stays."""
        self._stopped.set()
        self._thread.join(STOP_WITHIN)  # it may wait for a scheduler that does not answer

    def _look(self, seconds: float) -> None:
        ends = False
        while not ends:
            ends = self._stopped.wait(seconds)
            if (shuffler := self._shuffler()) is None:
                break
            ends = ends or shuffler.closed or not shuffler._calls.connected
            self._update(shuffler)
            del shuffler
        self._stopped.set()

    def _update(self, shuffler: Shuffler) -> None:
        """Replace the output of the cell, or write a line if the phase is another one, or after a while."""
        session = _asked(shuffler)
        if isinstance(session, str):
            phase, details, html = repr(shuffler), session and f": {session}", shuffler._repr_html_() + escape(session)
        else:
            phase, details = f"{session.way}: {session.progress()}", session.details()
            html = "" if self._display is None else session._repr_html_()
        if self._display is not None:
            self._handle.update(self._display.HTML(html))
        elif phase != self._phase or (details != self._details and time.monotonic() >= self._written + LINE_EVERY):
            print(phase, details, sep="", file=sys.stderr, flush=True)
            self._phase, self._details, self._written = phase, details, time.monotonic()


def _asked(shuffler: Shuffler) -> SessionSnapshot | str:
    """What a session does, or why that is not known: empty if it is closed."""
    try:
        return "" if shuffler.closed else shuffler._calls.ask(SessionSnapshot, "snapshot")
    except DShuffleError as error:  # a session that is lost, or follows another one in this moment
        return str(error)


def watch(shuffler: Shuffler, seconds: float = 1.0) -> SessionWidget:
    """Show what a session does, until it is closed: in a notebook as a table, elsewhere as lines on standard error.

    The view has the state of every worker and how many samples it holds, what each pair of workers exchanged and how
    fast, and how long each epoch trained and waited. The page ``/dshuffle`` of the Dask dashboard shows the same.
    Lines have the epoch, whom the session waits for, and the times of the last epoch that has ended. There is a
    line for each phase, and at most one more every five seconds. The call returns at once.

    Parameters
    ----------
    shuffler
        The shuffler to look at.
    seconds
        Time between two looks, at least 0.1. Each one is a short message to the scheduler.

    Returns
    -------
    SessionWidget
        A handle whose ``stop`` ends it.

    Raises
    ------
    InvalidParameter
        If ``seconds`` is not a number of at least 0.1.
    """
    return SessionWidget(shuffler, as_number("seconds", seconds, SHORTEST))
