"""The loader of a script that a launcher has started (:func:`dshuffle.spmd`), and on rank 0 the session of the job."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, ClusterError, DShuffleError, InvalidParameter
from dshuffle.launched.epoch_batches import EpochBatches, other_process
from dshuffle.launched.job import Step
from dshuffle.launched.launcher import check_process_group
from dshuffle.launched.rank import CLOSE_WITHIN, Rank
from dshuffle.planning.shares import Shares, parse_shares
from dshuffle.runtime import Partition, Shuffler
from dshuffle.runtime.client.checkpoints import SessionState, find_checkpoint, write_checkpoint
from dshuffle.runtime.client.retries import new_or_resumed
from dshuffle.runtime.worker.worker_plugin import partition_on
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


class SpmdLoader:
    """The batches of one rank of a job, epoch by epoch. Returned by :func:`dshuffle.spmd`.

    Attributes
    ----------
    rank, world_size
        Rank of this process, and number of processes.
    """

    def __init__(
        self,
        dataset: Dataset,
        rank: Rank,
        names: tuple[str, ...],
        batches: Callable[[Partition, bool], EpochBatches],
        checkpoint: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.rank, self.world_size = rank.place.rank, rank.place.world_size
        self._dataset, self._rank = dataset, rank
        self._names, self._batches, self._checkpoint, self._options = names, batches, checkpoint, options
        self._state: Mapping[str, Any] | None = None  # to continue
        self._continues = checkpoint is not None  # whether there may be a state to continue, on any rank
        self._client: Client | None = None  # on rank 0
        self._shuffler: Shuffler | None = None  # on rank 0
        self._states: Mapping[str, Any] | None = None  # of the attached objects of the job that this one continues
        self._objects: dict[str, Any] = {}  # that are attached
        self._next: int | None = None  # the epoch that the loop gets next
        self._rest: int | None = None  # an epoch of which another job has trained on a part
        self._length: int | None = None
        self._begun: EpochBatches | None = None  # the last epoch, which the loop may not have got yet
        self._partition = contextlib.ExitStack()
        self._closed = False
        self._pid = os.getpid()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a batch, in their order."""
        return self._names

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the loop gets next. It opens the session, on all ranks together."""
        return self._opened()

    def __len__(self) -> int:
        """Number of batches of this rank in the current epoch, or in the first one; the same on all ranks.

        It changes between epochs only with an assignment of chunks, and after an epoch that another job began.
        """
        self._opened()
        if self._length is None:
            self._begin(2)
        assert self._length is not None
        return self._length

    def __repr__(self) -> str:
        return f"<SpmdLoader rank={self.rank} of {self.world_size} dataset={self._dataset.url}>"

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
        if self._continues:
            self._opened()
        for name, value in objects.items():
            if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
                raise InvalidParameter.of(name, value, "an object with state_dict and load_state_dict")
            if self._states is not None and name not in self._states:
                raise CheckpointError(
                    f"the state that this job continues has no object {name!r}; it has {sorted(self._states)}. Attach "
                    "objects under the same names as before"
                )
        for name, value in objects.items():
            if self._states is not None:
                value.load_state_dict(self._states[name])
        self._objects |= objects

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job and the attached states, on rank 0. It can be written as JSON.

        The position is the number of batches that the loop of rank 0 was given, or has marked
        (:meth:`EpochBatches.mark_trained`). The other ranks must have as many: call it after a step in which all ranks
        take part, or after a barrier.

        On the other ranks, it returns at once how far this rank has come. No job can continue from that.

        Raises
        ------
        ClusterError
            If another rank does not have as many batches.
        """
        if self.rank:
            _, epoch, n_batches, n_all = self._step("")
            number = self._next or 0 if self._epoch is None else epoch
            return {"rank": self.rank, "epoch": number, "yielded": n_batches, "of": n_all}
        self._opened()
        return self._position(has_model=True)

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
            If the session is open already, or an object is attached.
        """
        if self.rank == 0 and not (isinstance(state, Mapping) and not state.get("rank")):
            raise InvalidParameter.of("state", state, "what state_dict() returned on rank 0")
        if self._next is not None or self._objects:
            raise ClusterError("the loader is in use already: load its state before", transient=False)
        self._state, self._continues = state, True

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
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def close(self) -> None:
        """Leave the job. Waits until all ranks have left their loops.

        Raises
        ------
        WorkerLost, PeerFailed
            If a rank was lost or has failed meanwhile.
        """
        self._close(None)

    # All ranks

    @property
    def _epoch(self) -> EpochBatches | None:
        """The epoch that the loop has got and not left."""
        begun = self._begun
        return None if begun is None or begun.number == self._next else begun

    def _step(self, does: str) -> Step:
        epoch = self._epoch
        return Step(does) if epoch is None else Step(does, epoch.number, epoch.n_trained, len(epoch))

    def _opened(self, total: int | None = None) -> int:
        """Open the session on rank 0, and begin its first epoch, unless none of the total is left; the next epoch."""
        if os.getpid() != self._pid:
            raise other_process()
        if self._closed:
            raise ClusterError("this loader is closed. Make a new one", transient=False)
        if self._next is None:
            check_process_group(self.world_size)  # libraries such as Lightning make it after the loader
            opened = self._rank.meet(self._step("opens the session"), lambda: self._open(total))
            self._next, self._states = opened["next"], pickle.loads(opened["states"])
            self._rest = self._next if opened["is_rest"] else None
            if self._states is not None and self._objects:
                raise ClusterError(
                    f"rank {self.rank} has attached objects that did not get the states of the job that this one "
                    "continues. Call load_state_dict on all ranks, before attach",
                    transient=False,
                )
            self._take(opened["epoch"])
        return self._next

    def _epochs(self, total: int) -> Iterator[EpochBatches]:
        self._opened(total)
        assert self._next is not None
        if missing := set(self._states or ()) - set(self._objects):
            names = ", ".join(sorted(missing))
            logger.warning("dshuffle: the state that this job continues has %s, which was not attached", names)
        while self._next < total:
            if self._begun is None or self._begun.number < self._next:
                self._begin(total - self._next)
            assert self._begun is not None
            self._next += 1
            yield self._begun
        if self._epoch is not None:
            step = self._given_back("ends its loop")
            self._rank.meet(step, self._end_epoch)
            self._begun = None

    def _begin(self, count: int) -> None:
        """Begin the next epoch, of a number of epochs that are to come."""
        step = self._given_back(f"asks for epoch {self._next}")
        self._take(self._rank.meet(step, lambda: self._begin_epoch(count)))

    def _take(self, begun: Mapping[str, Any] | None) -> None:
        """Take the partition of an epoch that has begun."""
        if begun is None:
            return
        worker = self._rank.worker
        rank = begun["addresses"].index(worker.address)
        with self._job_errors():
            access = partition_on(worker, begun["session"], rank, begun["number"])
            partition = self._partition.enter_context(access)
        self._begun = self._batches(partition, begun["number"] == self._rest)
        self._rank.batches, self._length = self._begun, len(self._begun)

    def _given_back(self, does: str) -> Step:
        """Give the partition of the current epoch back; the step that comes then."""
        step, epoch = self._step(does), self._epoch
        if epoch is not None:
            step = step._replace(n_batches=epoch.n_given)
            self._rank.batches = None
            self._partition.close()
        return step

    def _close(self, error: BaseException | None) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked child ends without the job
            return
        self._closed = True
        try:
            if error is None:
                self._leave()
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
                if self._shuffler is not None and error is not None:  # it does not wait for workers that are gone
                    self._shuffler.__exit__(type(error), error, error.__traceback__)
            finally:
                self._rank.close(failed=error is not None)

    def _leave(self) -> None:
        """Wait until all ranks have left their loops, and close the session on rank 0."""
        step, epoch = self._step("leaves the job"), self._epoch
        if epoch is not None and not epoch.is_complete:
            epoch.mark(epoch.n_trained)
        self._rank.batches = None
        self._partition.close()
        self._rank.meet(step, self._end)

    @contextlib.contextmanager
    def _job_errors(self) -> Iterator[None]:
        """Raise the reason for which the job has failed in place of what the session makes of it."""
        try:
            yield
        except (DShuffleError, OSError) as error:
            try:
                self._rank.hear()
            except DShuffleError as failure:
                raise failure from error
            raise

    # Rank 0

    def _open(self, total: int | None) -> dict[str, Any]:
        """Open the session, which continues a state or a checkpoint if there is one, and begin its first epoch."""
        dataset, checkpoint, state = self._dataset, self._checkpoint, self._state
        saved_state = state
        if state is None and checkpoint is not None:
            saved_state = find_checkpoint(checkpoint, dataset)
        if saved_state is not None:
            check_shares(self._options.get("shares", SessionState.from_dict(saved_state, dataset).choices.shares))
        # All ranks have come. With their names, the session does not wait for a rank that was lost since then.
        options = {**self._options, "on_loss": "raise", "workers": [str(rank) for rank in range(self.world_size)]}
        if self._client is None:  # else an earlier attempt has failed
            self._client = Client(
                self._rank.address, security=self._rank.protected.security, loop=self._rank.loop, set_as_default=False
            )
        with self._job_errors():
            if state is not None:
                options.pop("first_epoch", None)
                self._shuffler = Shuffler.resume(self._client, dataset, state, checkpoint=checkpoint, **options)
            elif checkpoint is not None:
                self._shuffler = new_or_resumed(self._client, dataset, checkpoint, saved_state, options)
            else:
                self._shuffler = Shuffler(self._client, dataset, **options)
            first, is_rest = self._shuffler.next_epoch, bool(self._shuffler.state_dict()["trained"])
        count = 2 if total is None else total - first
        begun = self._begin_epoch(count) if count > 0 else None
        return {"next": first, "is_rest": is_rest, "states": pickle.dumps(self._shuffler.attached), "epoch": begun}

    def _begin_epoch(self, count: int) -> dict[str, Any]:
        """Begin the next epoch, of a number of epochs that are to come, and tell where its partitions are."""
        shuffler = self._opened_shuffler
        self._attach_states()
        with self._job_errors():
            epoch = next(shuffler.epochs(count))
            epoch._tasks.next_call()  # it has no tasks: the loops of the ranks train on it
        addresses, session = list(shuffler.addresses), shuffler._calls.session_id
        return {"number": epoch.number, "addresses": addresses, "session": session}

    def _end_epoch(self) -> None:
        """Write the last checkpoint."""
        self._attach_states()
        with self._job_errors():
            for _ in self._opened_shuffler.epochs(0):
                pass

    @property
    def _opened_shuffler(self) -> Shuffler:
        assert self._shuffler is not None
        return self._shuffler

    def _attach_states(self) -> None:
        """Attach the states of the objects at the end of the current epoch."""
        epoch = self._epoch
        if epoch is None:
            return
        if epoch.n_given < len(epoch):
            logger.warning(
                "dshuffle: the loops of all ranks have left epoch %d after %d of its %d batches. The other samples "
                "were not trained on in this epoch",
                *(epoch.number, epoch.n_given, len(epoch)),
            )
        if self._objects:
            self._opened_shuffler.attach(self._object_states(), epoch.number)

    def _object_states(self) -> dict[str, Any]:
        return {name: on_host(value.state_dict()) for name, value in self._objects.items()}

    def _position(self, *, has_model: bool) -> dict[str, Any]:
        """The state of the session, after as many batches of the current epoch on every rank as on this one."""
        shuffler, epoch = self._opened_shuffler, self._epoch
        with self._job_errors():
            if self._objects or has_model:
                shuffler.attach(self._object_states() or shuffler.attached, shuffler.epoch)
            # When ranks leave, they mark it themselves. A complete epoch needs no marks.
            if epoch is not None and epoch.n_trained and not epoch.is_complete and not self._closed:
                self._rank.mark_all(epoch.number, epoch.n_trained)
            state = shuffler.state_dict()
        if epoch is None or not epoch.is_complete:
            return state
        started = {name: value for name, value in state.items() if name != "trained_digest"}
        return {**started, "epoch": epoch.number + 1, "trained": [], "trained_weights": []}

    def _write(self) -> None:
        assert self._checkpoint is not None
        write_checkpoint(self._checkpoint, self._position(has_model=False), self._dataset, was_written=True)

    def _end(self) -> None:
        """Close the session. All ranks have left their loops."""
        assert self._rank.job is not None
        epoch = self._epoch
        if epoch is not None and epoch.is_complete:
            self._end_epoch()
        elif epoch is not None and self._checkpoint is not None:
            self._write()
        if self._shuffler is not None:
            with self._job_errors():
                self._shuffler.close()
        self._rank.job.ended = True  # from now on ranks may go


def check_shares(shares: Shares) -> None:
    """Refuse shares that follow from measured times of training, or from names, which a job does not have."""
    policy = parse_shares(shares)
    if policy.not_in_jobs:
        hint = "Give 'even', or numbers, one for each rank."
        raise InvalidParameter.because(f"shares={str(policy)!r}", policy.not_in_jobs, hint)


def on_host(value: Any) -> Any:
    """Copy a state, with tensors in the memory of the host. It is pickled at once."""
    if callable(getattr(value, "cpu", None)):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the attributes that PyTorch gives to states of modules
        copied.update({key: on_host(item) for key, item in value.items()})
        return copied
    return type(value)(map(on_host, value)) if type(value) in (list, tuple) else value
