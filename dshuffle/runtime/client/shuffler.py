"""The user interface: a :class:`Shuffler` for a Dask client and a dataset."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from distributed import Client
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import MixingWarning
from dshuffle.planning import Assignment, Choices, Classes, Remainder, parse_assignment
from dshuffle.planning.cost import ClusterRates
from dshuffle.planning.shares import Shares, parse_shares
from dshuffle.records import EpochRecord
from dshuffle.runtime.client.checkpoint_file import CheckpointFile
from dshuffle.runtime.client.checkpoints import write_checkpoint
from dshuffle.runtime.client.cluster_view import (
    check_client,
    is_adaptive,
    keep_nannies,
    log_if_slow,
    resolved_choice,
    starts_no_more,
    wait_for_workers,
    warn_of_absent_names,
)
from dshuffle.runtime.client.epoch import Epoch
from dshuffle.runtime.client.epoch_sequence import EpochSequence, Membership
from dshuffle.runtime.client.open_session import OpenSession, new_id
from dshuffle.runtime.client.session_client import SessionClient, install_plugin
from dshuffle.runtime.client.session_state import Resumption, SessionPosition, resumption, shuffle_digest
from dshuffle.runtime.dataset_inputs import checked_sharding, resolved, warn_of_small_classes
from dshuffle.runtime.measure.measurement import expected_seconds
from dshuffle.runtime.process import Timeline
from dshuffle.runtime.session_spec import DatasetReference, EarlierWorkers, SessionOptions, SessionRequest, WorkerChoice
from dshuffle.runtime.settings import Settings
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset, Place, as_dataset

logger = logging.getLogger(__name__)


def session_request(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    options: SessionOptions,
    *,
    start: Remainder,
    carried: EarlierWorkers | None = None,
) -> tuple[SessionRequest, Classes | None]:
    """Check a way of shuffling on this dataset and cluster, and read what its plans need from the dataset."""
    choices = resolved(dataset, choices)
    options.check_way(choices)
    settings = Settings.from_config(adaptive=is_adaptive(client))
    if (warning := starts_no_more(client, options.choice)) is not None:
        logger.warning("dshuffle: %s", warning)
    check_emulated_rates()  # those of this process, which reads rows as well
    deliveries = {choices.delivery: 0.0}
    if choices.is_auto:
        deliveries = expected_seconds(client, dataset, choices, options, memory_fraction=settings.memory_fraction)
    classes = choices.balance
    if classes is not None:
        choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
    request = SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries=deliveries,
        options=options,
        settings=settings,
        start=start,
        kept_as=shuffle_digest(dataset, choices) if options.keep_cache else None,
        carried=carried,
    )
    return request, classes


SHUFFLER_CALL = 3
"""Stack level of warnings: they point to the call of :class:`dshuffle.Shuffler`."""


def open_sequence(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    options: SessionOptions,
    *,
    first_epoch: int,
    checkpoint: str | os.PathLike[str] | None,
    resumed: Resumption | None,
) -> EpochSequence:
    """Open a session, and write its first checkpoint."""
    timeline = Timeline("the client opens a session")
    start, carried = Remainder(first_epoch, ()), None
    if resumed is not None:
        start, carried = resumed.state.next, EarlierWorkers.of(resumed.state.history, resumed.state.next)
    request, classes = session_request(client, dataset, choices, options, start=start, carried=carried)
    file = _checkpoint_file(checkpoint, dataset, resumed)
    timeline.end_step("request checked")
    sequence, release = None, keep_nannies(client)
    try:
        membership = _opened(client, request, timeline)
        state = None if resumed is None else resumed.state
        position = SessionPosition(dataset, request.choices, start, lambda: membership.current.history, state)
        sequence = EpochSequence(client, dataset, membership, position, file, release)
        if advice := sequence.choices.assignment.warning(membership.current.n_workers):
            warnings.warn(advice, MixingWarning, stacklevel=SHUFFLER_CALL)
        warn_of_absent_names(client, request.choices.shares)
        if classes is not None:
            warn_of_small_classes(classes, membership.current.n_workers, stacklevel=SHUFFLER_CALL)
        sequence.write_checkpoint()  # one that cannot be written is refused now
        timeline.end_step("checkpoint written")
    except BaseException:  # also if warnings are turned into errors
        if sequence is not None:
            sequence.close()
        release()
        if file is not None:
            file.release()
        raise
    timeline.log()
    return sequence


def _checkpoint_file(
    url: str | os.PathLike[str] | None, dataset: Dataset, resumed: Resumption | None
) -> CheckpointFile | None:
    if url is None:
        return None
    if resumed is not None:
        return resumed.checkpoint or CheckpointFile(url, dataset)
    file = CheckpointFile(url, dataset)
    try:
        file.check_empty()
    except BaseException:
        file.release()
        raise
    return file


def _opened(client: Client, request: SessionRequest, timeline: Timeline) -> Membership:
    with log_if_slow("the scheduler and the workers are being set up"):
        install_plugin(client)
    timeline.end_step("plugins installed on the scheduler and all workers")
    options = request.options
    if options.min_workers > 1:
        limit = "dshuffle.timeout"
        wait_for_workers(client, options.min_workers, request.settings.timeout, limit=limit, choice=options.choice)
    request = dataclasses.replace(request, choice=resolved_choice(client, options))
    timeline.end_step("workers waited for")
    with log_if_slow("a session is being opened: workers are set up, and open the dataset"):
        membership = Membership(OpenSession(client, request))
    timeline.end_step("session opened")
    return membership


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
        the same number of samples of each class, or one more. Works with ``"global"``, ``"partial:Q"`` (all workers
        still exchange the same number of samples) and ``"local"``. The sharding ``"random"`` is then drawn with this
        balance; any other sharding must have it, as ``"stratified:y"`` does.
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
        _resumed: Resumption | None = None,
    ) -> None:
        check_client(client)
        keywords: dict[str, Any] = {
            "on_loss": on_loss,
            "memory_limit": memory_limit,
            "cache_directory": cache_directory,
            "keep_cache": keep_cache,
            "server": server,
            "workers": workers,
            "resources": resources,
            "cluster": cluster,
            "elastic": elastic,
            "min_workers": min_workers,
        }
        options = SessionOptions(**keywords)
        choices = Choices(
            assignment=parse_assignment(assignment),
            delivery=delivery,
            caching=caching,
            cache_fraction=cache_fraction,
            relay=relay,
            balance=None if balance is None else Classes(balance),
            every=every,
            between=between,
            seed=seed,
            shares=parse_shares(shares),
        )
        self.dataset = as_dataset(dataset)
        choices = dataclasses.replace(choices, sharding=checked_sharding(self.dataset, sharding))
        self._sequence = open_sequence(
            client,
            self.dataset,
            choices,
            options,
            first_epoch=as_integer("first_epoch", first_epoch, 0),
            checkpoint=checkpoint,
            resumed=_resumed,
        )

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
        dataset = as_dataset(dataset)
        with resumption(dataset, state, options) as resumed:
            return cls(client, dataset, **resumed.keywords, _resumed=resumed)

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
        return self._sequence.state()

    def save(self, url: str | os.PathLike[str]) -> None:
        """Write the state of this session to a checkpoint.

        Raises
        ------
        CheckpointError
            If it cannot be written. An earlier checkpoint is still there.
        """
        write_checkpoint(url, self.state_dict(), self.dataset)

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
        self._sequence.attach(value, epoch)

    @property
    def checkpoint(self) -> str | os.PathLike[str] | None:
        """Where a checkpoint is written in every epoch, if anywhere."""
        return None if self._sequence.checkpoint is None else self._sequence.checkpoint.url

    @property
    def attached(self) -> Any:
        """The value that was attached, in this session or in the one that it continues; None without one.

        It was pickled. So continue only states and checkpoints that you trust.
        """
        return self._sequence.position.attached

    @property
    def client(self) -> Client:
        """The Dask client, for trainers that need more than :meth:`Epoch.map`."""
        return self._sequence.client

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the workers that train, in rank order."""
        return self._sequence.membership.current.ranks

    @property
    def n_workers(self) -> int:
        """Number of workers that train in the current epoch. It changes if the session is elastic."""
        return self._sequence.membership.current.n_workers

    def __repr__(self) -> str:
        return repr(self._sequence)

    def _repr_html_(self) -> str:
        return self._sequence._repr_html_()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._sequence.closed

    @property
    def epoch(self) -> int | None:
        """Number of the current epoch; None before the first one."""
        return self._sequence.epoch

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that comes next. For a session that continues another one, it counts all epochs."""
        return self._sequence.position.next_epoch

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self._sequence.membership.elastic

    @property
    def records(self) -> list[EpochRecord]:
        """Measurements of the epochs that have ended. The current epoch is recorded when the next one begins."""
        return self._sequence.recorder.records

    @property
    def choices(self) -> Choices:
        """The way of shuffling."""
        return self._sequence.choices

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._sequence.close()
        else:
            self._sequence.close_after(error)

    def __reduce__(self) -> NoReturn:
        self._sequence.__reduce__()

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
        sequence = self._sequence
        return (Epoch(sequence, tasks) for tasks in sequence.epochs(as_integer("count", count, 0)))

    def accept(self) -> None:
        """Let the current epoch end although tasks did not finish. See :meth:`Epoch.accept`."""
        if self._sequence.position.tasks is not None:
            self._sequence.position.tasks.accept(None)

    def close(self) -> None:
        """Free the cache partitions on all workers. Idempotent. The dataset is not changed.

        Waits for the tasks of the current epoch. The log says if some of them did not finish.

        Raises
        ------
        ClusterError
            If the scheduler does not report within 5 s how the tasks ended (20 s while ``close`` waits for them). If it
            stops answering after that, this is only logged.
        """
        self._sequence.close_and_log()

    def look_up_members(self) -> bool:
        """Ask the scheduler for :attr:`addresses`; whether ranks have other workers than at the last look."""
        return self._sequence.membership.current.look_up_members()

    @property
    def _choice(self) -> WorkerChoice:
        return self._sequence.membership.current.request.choice

    @property
    def _calls(self) -> SessionClient:
        return self._sequence.calls
