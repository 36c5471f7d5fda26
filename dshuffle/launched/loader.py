"""Where a script that a launcher has started begins (:func:`dshuffle.spmd`): its loader, and on rank 0 the session."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from distributed import Client
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, ClusterError, InvalidParameter
from dshuffle.integrations import process_group
from dshuffle.launched.connections import place_of
from dshuffle.launched.rank import CLOSE_WITHIN, Rank, other_process
from dshuffle.planning.batching import MODES, UNEVEN, Batching
from dshuffle.runtime import Partition, Shuffler
from dshuffle.runtime.client.checkpoints import Checkpoint
from dshuffle.runtime.client.shuffler import new_or_resumed
from dshuffle.runtime.settings import as_seconds
from dshuffle.runtime.worker.worker_plugin import partition_on
from dshuffle.store import Dataset, as_dataset
from dshuffle.store import Place as DatasetPlace

logger = logging.getLogger(__name__)

REFUSED = {"on_loss", "elastic", "min_workers", "workers", "client", "server"}
"""Parameters of a shuffler that a script cannot choose."""

Load = Callable[[int], tuple[NDArray[Any], ...]]


class EpochBatches:
    """The batches of this rank in one epoch. Iterate over it, once in each epoch.

    It is valid until the loop asks for the next epoch. All ranks have the same number of batches, which is its length.

    Attributes
    ----------
    number
        Number of the epoch, from 0.
    partition
        The :class:`~dshuffle.Partition` of this rank, for everything that batches do not do.
    n_given
        Number of batches that the loop was given.
    """

    def __init__(self, partition: Partition, batching: Batching, loader: SpmdLoader) -> None:
        self.number, self.partition, self.n_given = partition.epoch, partition, 0
        self._batching, self._loader = batching, loader
        self._marked: int | None = None

    def __len__(self) -> int:
        return len(self._batching)

    def __iter__(self) -> Iterator[Any]:
        batch, self.n_given = self._loader._convert(self._arrays, len(self)), 0
        for number in range(len(self)):
            given = batch(number)
            self.n_given = number + 1
            yield given

    @property
    def n_trained(self) -> int:
        """Number of batches that count as trained on: those that the loop was given, or has marked."""
        return self.n_given if self._marked is None else self._marked

    @property
    def is_complete(self) -> bool:
        """Whether all batches count as trained on."""
        return self.n_trained == len(self)

    def mark_trained(self, n_batches: int) -> None:
        """Say how many batches of this epoch the loop has trained on, if something asks for batches ahead of it.

        A batch counts as trained on when the loop was given it. After the first call of this method, only this number
        counts: for :meth:`SpmdLoader.save` and :meth:`SpmdLoader.state_dict`, and when the loop ends in the middle of
        the epoch. Call it with 0 before the first batch is asked for, and on all ranks.

        Raises
        ------
        InvalidParameter
            If it is not in [0, number of batches that were given].
        """
        if as_integer("n_batches", n_batches, 0) > self.n_given:
            raise InvalidParameter.of("n_batches", n_batches, f"at most {self.n_given}, the batches that were given")
        self._marked = n_batches
        self._loader._rank.check_batch(self.number, n_batches)

    def mark(self, n_batches: int) -> None:
        """Note for the session that the first batches were trained on."""
        is_all = n_batches == len(self)  # what was dropped is not trained on in this epoch
        self.partition.mark_trained(None if is_all else self._batching.n_samples(n_batches))

    def __reduce__(self) -> Any:
        raise other_process()

    def _arrays(self, number: int) -> tuple[NDArray[Any], ...]:
        self._loader._rank.check_batch(self.number, number + 1 if self._marked is None else 0)
        return tuple(self.partition.take(self._batching.positions(number), self._loader.names).values())


class SpmdLoader:
    """Give each process of a script that torchrun, srun or mpirun has started its batches of every epoch.

    The script keeps its loop. Make it on all ranks, alike, and use it in a ``with`` statement. ``dshuffle.spmd`` is a
    short name of it. See docs/launchers.md.

    Parameters
    ----------
    dataset
        A :class:`Dataset`, or the URL of one that all ranks can open.
    batch_size
        Number of samples in a batch of one rank.
    mode
        How all ranks get the same number of batches. ``"uneven"``: every sample is in one batch, and the sizes of
        a rank's batches differ by at most one. ``"drop"``: all batches are full, and samples that do not fill one are
        left out. ``"pad"``: all batches are full, and the last ones repeat samples.
    arrays
        Names of the arrays of a batch, in this order; by default all arrays, in alphabetical order.
    device
        Device of PyTorch, such as ``"cpu"`` or ``"cuda"``: batches are tuples of tensors on it. By default they are
        tuples of NumPy arrays.
    checkpoint
        File or object to which rank 0 writes the position at the start of every epoch and after the last one, with the
        states of the objects that were attached (:meth:`SpmdLoader.attach`). If it exists, the job continues it, with
        any number of ranks.
    rank, world_size
        Rank of this process, and number of processes; by default those of the launcher. Without a launcher, the process
        is a job of one rank.
    address
        Name or IP address of the host of rank 0, on the network that the ranks use; by default from the launcher.
    port
        Port on which rank 0 listens. By default all ranks derive it from the launcher's name of the job. It is needed
        if no launcher says to which job a rank belongs.
    timeout
        Time to wait for the other ranks at the start: seconds, or text such as ``"5m"``.
    **options
        Parameters of :class:`Shuffler`, such as ``assignment`` and ``seed``, except for those that concern the workers.

    Attributes
    ----------
    rank, world_size
        Rank of this process, and number of processes.
    names
        Names of the arrays of a batch, in their order.

    Raises
    ------
    InvalidParameter
        If the value of a parameter is not allowed, or the variables of the launcher are incomplete.
    ImportError
        If a device is given, and PyTorch is not installed.
    DatasetError
        If the dataset cannot be opened.
    PeerFailed
        If the ranks have given other values.
    ClusterError
        If the other ranks do not come in time, or rank 0's port is not free.

    Examples
    --------
    >>> import numpy as np, dshuffle
    >>> dataset = dshuffle.create_dataset("memory://doc-spmd", {"x": np.arange(10.0), "y": np.arange(10)})
    >>> with dshuffle.spmd(dataset, batch_size=4, rank=0, world_size=1) as loader:
    ...     for epoch in loader.epochs(2):
    ...         print(epoch.number, [len(y) for x, y in epoch], sum(int(y.sum()) for x, y in epoch))
    0 [3, 3, 4] 45
    1 [3, 3, 4] 45
    """

    def __init__(
        self,
        dataset: Dataset | DatasetPlace,
        *,
        batch_size: int,
        mode: str = UNEVEN,
        arrays: Sequence[str] | None = None,
        device: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        port: int | None = None,
        timeout: str | float = "5m",
        **options: Any,
    ) -> None:
        self._batch_size, self._mode = as_integer("batch_size", batch_size, 1), mode
        if mode not in MODES:
            raise InvalidParameter.of("mode", mode, f"one of {list(MODES)}")
        for name in sorted(REFUSED & options.keys()):
            raise InvalidParameter.because(name, "a job chooses it itself")
        check_shares(options.get("shares"))
        inspect.signature(Shuffler).bind_partial(**options)
        seconds = as_seconds("timeout", timeout, positive=True)
        place = place_of(os.environ, rank=rank, world_size=world_size, address=address)
        self._convert: Callable[[Load, int], Callable[[int], Any]] = lambda load, n_batches: load
        if device is not None:
            self._convert = importlib.import_module("dshuffle.integrations.torch").to_device(device)
        self._dataset = as_dataset(dataset)
        names = sorted(self._dataset.layout.names)  # rows have an order of their own
        if isinstance(arrays, str) or not set(names if arrays is None else arrays or "-") <= set(names):
            raise InvalidParameter.of("arrays", arrays, f"a list of names from {names}")
        self.rank, self.world_size, self.names = place.rank, place.world_size, tuple(arrays or names)
        self._checkpoint, self._options = checkpoint, options
        self._state: Mapping[str, Any] | None = None  # to continue
        self._client: Client | None = None  # on rank 0
        self._shuffler: Any = None  # on rank 0
        self._states: Mapping[str, Any] | None = None  # of the attached objects of the job that this one continues
        self._objects: dict[str, Any] = {}  # that are attached
        self._next = 0  # the epoch that the loop gets next, once the session is open
        self._begun: EpochBatches | None = None  # the last epoch, which the loop may not have got yet
        self._epoch: EpochBatches | None = None  # the epoch that the loop has got and not left
        self._partition = contextlib.ExitStack()
        asked = {"dataset": self._dataset.identity, "batch_size": batch_size, "mode": mode, **options}
        terms = ", ".join(f"{name}={_in_words(value)}" for name, value in asked.items())
        self._rank = Rank(place, f"{terms}, world_size={self.world_size}", port, seconds)

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the loop gets next. It opens the session, on all ranks together."""
        self._opened()
        return self._next

    def __len__(self) -> int:
        """Number of batches of this rank in the current epoch, or in the first one; the same on all ranks.

        It changes between epochs only with an assignment of chunks, and after an epoch that another job began.
        """
        return len(self._opened())

    def epochs(self, total: int) -> Iterator[EpochBatches]:
        """Iterate over the epochs up to a total.

        A job that continues another one gets the epochs that are left, so that the script stays the same. Call it alike
        on all ranks.

        The loop may leave an epoch early; it counts as trained on once the loop asks for the next one. If it does not,
        the checkpoint has the position in the middle. A batch counts as trained on once the loop was given it, so train
        on it before the loop ends.

        Parameters
        ----------
        total
            Number of epochs, with those of the jobs that this one continues.

        Yields
        ------
        EpochBatches
            The batches of an epoch.

        Raises
        ------
        WorkerLost
            If a rank was lost.
        PeerFailed
            If another rank has failed, or does not go through the same epochs.
        ExchangeError, ClusterError
            If the exchange cannot go on.
        """
        return self._epochs(as_integer("total", total, 0))

    def attach(self, **objects: Any) -> None:
        """Write the states of objects with the position, and load them if the job continues another one.

        Call it on all ranks, before the first epoch. Rank 0 writes its own states, when its loop asks for the next
        epoch and in :meth:`save`.

        Parameters
        ----------
        **objects
            Objects with ``state_dict`` and ``load_state_dict``, such as modules, optimizers and schedules of PyTorch,
            under names of your choice.

        Raises
        ------
        InvalidParameter
            If an object does not have these methods.
        CheckpointError
            If the state that the job continues has no object of this name.
        """
        self._opened()
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise InvalidParameter.of(name, value, "an object with state_dict and load_state_dict")
            if self._states is not None:
                if name not in self._states:
                    raise CheckpointError(
                        f"the state that this job continues has no object {name!r}; it has {sorted(self._states)}. "
                        "Attach objects under the same names as before"
                    )
                value.load_state_dict(self._states[name])
            self._objects[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job and the attached states, on rank 0. It can be written as JSON.

        The position is the number of batches that the loop of rank 0 was given, or has marked
        (:meth:`EpochBatches.mark_trained`). The other ranks must have as many: call it after a step in which all ranks
        take part, or after a barrier.

        On the other ranks, it returns at once. No job can continue from what it returns there.

        Raises
        ------
        ClusterError
            If another rank does not have as many batches.
        """
        if self.rank:
            return {"rank": self.rank}
        self._opened()
        return self._position()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state, with any number of ranks. Call it on all ranks, before :meth:`attach`.

        Parameters
        ----------
        state
            What :meth:`state_dict` returned, on rank 0. The other ranks may have any value, such as None.

        Raises
        ------
        InvalidParameter
            If rank 0 has no state.
        ClusterError
            If the session is open already.
        """
        if self.rank == 0 and not (isinstance(state, Mapping) and not state.get("rank")):
            raise InvalidParameter.of("state", state, "what state_dict() returned on rank 0")
        if self._begun is not None:
            raise ClusterError("the loader is in use already: load its state before", transient=False)
        self._state = state

    def save(self) -> None:
        """Write the position and the attached states to the checkpoint, as :meth:`state_dict` returns them.

        Rank 0 writes; on other ranks nothing happens.

        Raises
        ------
        InvalidParameter
            If the loader has no checkpoint.
        CheckpointError
            If it cannot be written.
        """
        if self._checkpoint is None:
            raise InvalidParameter.of("checkpoint", None, "a file or an object, to save the position there")
        if not self.rank:
            self._opened()
            Checkpoint(self._checkpoint, self._dataset, was_used=True).write(self._position())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._rank.closed or os.getpid() != self._rank.pid:  # a forked child ends without the job
            return
        try:
            if error is None:
                if self._epoch is not None:
                    with self._rank.errors():
                        self._epoch.mark(self._epoch.n_trained)
                self._meet("leaves the job", self._end)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._partition.close()
            try:
                if error is not None:
                    self._rank.tell(error)  # before the session ends because of it
                if self._client is not None:
                    with contextlib.suppress(OSError):  # TimeoutError among them
                        self._client.close(timeout=CLOSE_WITHIN)
                if self._shuffler is not None:  # after the client, so that it does not wait for workers that are gone
                    self._shuffler.__exit__(kind, error, trace)
            finally:
                self._rank.close(failed=error is not None)

    def close(self) -> None:
        """Leave the job. Waits until all ranks have left their loops.

        Raises
        ------
        WorkerLost, PeerFailed
            If a rank was lost or has failed meanwhile.
        """
        self.__exit__(None, None, None)

    # All ranks

    def _meet(self, does: str, work: Callable[[], Any]) -> Any:
        """Give the partition of the current epoch back, and meet the other ranks, for which rank 0 works."""
        early: tuple[int, ...] = ()
        if (epoch := self._epoch) is not None:
            does += f" after {epoch.n_trained} of {len(epoch)} batches of epoch {epoch.number}"
            early = () if epoch.is_complete else (epoch.number, epoch.n_trained)
        self._partition.close()
        answer = self._rank.meet(does, work, early=early)
        self._epoch = None
        return answer

    def _opened(self, total: int = sys.maxsize) -> EpochBatches:
        """Open the session, unless it is open, and begin its first epoch; the last epoch that has begun."""
        self._rank.check()
        if self._begun is None:
            group = process_group()  # libraries such as Lightning make it after the loader
            if group is not None and (size := group.get_world_size()) != self.world_size:
                hint = "Give rank=dist.get_rank(), world_size=dist.get_world_size() and a free port= on all ranks."
                allowed = f"{size}, as the process group of PyTorch has it"
                raise InvalidParameter.of("world_size", self.world_size, allowed, hint)
            return self._begin("opens the session", total)
        return self._begun

    def _begin(self, does: str, total: int) -> EpochBatches:
        """Begin the next epoch, of which this rank takes its partition."""
        left = self._epoch
        answer = self._meet(does, lambda: self._begin_epoch(total))
        if self.rank == 0 and left is not None and not left.is_complete:
            logger.warning(
                "dshuffle: the loops of all ranks have left epoch %d after %d of its %d batches. The other samples "
                "were not trained on in this epoch",
                *(left.number, left.n_trained, len(left)),
            )
        number, session, addresses, is_rest, states = answer
        worker = self._rank.worker
        with self._rank.errors():
            access = partition_on(worker, session, addresses.index(worker.address), number)
            partition = self._partition.enter_context(access)
        if self._begun is None:
            self._next, self._states = number, pickle.loads(states)
        (smallest, largest), size = partition.shares, self._batch_size
        batching = Batching(len(partition), smallest, largest, size, self._mode, partition.unequal, rest=is_rest)
        self._begun = self._rank.batches = EpochBatches(partition, batching, self)
        return self._begun

    def _epochs(self, total: int) -> Iterator[EpochBatches]:
        begun = self._opened(total)
        if missing := ", ".join(sorted(set(self._states or ()) - set(self._objects))):
            logger.warning("dshuffle: the state that this job continues has %s, which was not attached", missing)
        for number in range(self._next, total):
            if begun.number < number:
                begun = self._begin(f"asks for epoch {number}", total)
            self._next, self._epoch = number + 1, begun
            yield begun
        if self._epoch is not None:
            self._meet("ends its loop", self._end_epoch)

    # Rank 0

    def _open(self) -> Shuffler:
        """Open the session, which continues a state or a checkpoint if there is one."""
        dataset, checkpoint, state, rank = self._dataset, self._checkpoint, self._state, self._rank
        # All ranks have come. With their names, the session does not wait for a rank that was lost since then.
        options = {**self._options, "on_loss": "raise", "workers": [str(rank) for rank in range(self.world_size)]}
        self._client = Client(rank.worker.scheduler.address, loop=rank.loop, set_as_default=False)
        saved = state if state is not None or checkpoint is None else Checkpoint(checkpoint, dataset).read()
        if saved is not None and "shares" not in options:
            check_shares(saved["choices"].get("shares"))
        if checkpoint is not None and state is None:
            return new_or_resumed(self._client, dataset, checkpoint, saved, options)
        if state is None:
            return Shuffler(self._client, dataset, **options)
        options.pop("first_epoch", None)
        return Shuffler.resume(self._client, dataset, state, checkpoint=checkpoint, **options)

    def _begin_epoch(self, total: int) -> tuple[Any, ...]:
        """Begin the next epoch, and tell where its partitions are. The exchange for the one after it begins as well."""
        states, is_rest = None, False
        if self._shuffler is None:
            self._shuffler = self._open()
            states, is_rest = self._shuffler.attached, bool(self._shuffler.state_dict()["trained"])
        self._attach()
        shuffler = self._shuffler
        epoch = next(shuffler.epochs(max(1, total - shuffler.next_epoch)))
        epoch._tasks.next_call()  # it has no tasks: the loops of the ranks train on it
        return epoch.number, shuffler._calls.session_id, shuffler.addresses, is_rest, pickle.dumps(states)

    def _end_epoch(self) -> None:
        """Write the last checkpoint."""
        self._attach()
        list(self._shuffler.epochs(0))

    def _attach(self) -> None:
        """Attach the states of the objects to the current epoch. A script may keep its model itself."""
        if self._objects:
            states = {name: on_host(value.state_dict()) for name, value in self._objects.items()}
            self._shuffler.attach(states, self._shuffler.epoch)

    def _position(self) -> dict[str, Any]:
        """The state of the session, after as many batches of the current epoch on every rank as on this one."""
        epoch = self._epoch
        with self._rank.errors():
            self._attach()
            if epoch is not None and epoch.n_trained and not epoch.is_complete:
                self._rank.mark_all(epoch.number, epoch.n_trained)
            state: dict[str, Any] = self._shuffler.state_dict()
        if epoch is None or not epoch.is_complete:
            return state
        # A complete epoch needs no marks, and the other ranks may still train on their last batch.
        return {**state, "epoch": epoch.number + 1, "trained": [], "trained_digest": None, "trained_weights": []}

    def _end(self) -> None:
        """Close the session. All ranks have left their loops."""
        shuffler, epoch = self._shuffler, self._epoch
        if epoch is not None and epoch.is_complete:
            self._end_epoch()
        elif epoch is not None and self._checkpoint is not None:
            self._attach()
            Checkpoint(self._checkpoint, self._dataset, was_used=True).write(shuffler.state_dict())
        if shuffler is not None:
            shuffler.close()
        assert self._rank.job is not None
        self._rank.loop.add_callback(self._rank.job.end)


def on_host(value: Any) -> Any:
    """Copy a state, with tensors in the memory of the host. It is pickled at once."""
    if callable(getattr(value, "cpu", None)):
        return value.detach().cpu()
    if isinstance(value, dict):
        value = copy.copy(value)  # keeps the attributes that PyTorch gives to states of modules
        value.update({key: on_host(item) for key, item in value.items()})
    return type(value)(map(on_host, value)) if type(value) in (list, tuple) else value


def check_shares(shares: object) -> None:
    """Refuse shares that follow the time of training."""
    if str(shares) == "measured":
        reason = "dshuffle does not see how long a step of the script waits for other ranks"
        raise InvalidParameter.because("shares='measured'", reason, "Give 'even', or numbers, one for each rank.")


def _in_words(value: object) -> str:
    """What ranks compare: an object that does not say what it is has an address, which differs between them."""
    if hasattr(value, "__array__"):
        return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


spmd = SpmdLoader
