"""The loader of a script that a launcher has started (:func:`dshuffle.spmd`)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter
from dshuffle.launched.attached import AttachedObjects, pickled, unpickled
from dshuffle.launched.epoch_batches import Convert, EpochBatches, batching_of, other_process
from dshuffle.launched.job import rank_failed
from dshuffle.launched.launcher import check_process_group
from dshuffle.launched.mailbox import LOG_AFTER, Mailbox, Progress
from dshuffle.launched.process import RankProcess
from dshuffle.launched.session import JobSession
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
        process: RankProcess,
        mailbox: Mailbox,
        *,
        batch_size: int,
        mode: str,
        names: Sequence[str],
        convert: Convert | None,
        checkpoint: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.rank, self.world_size = process.place.rank, process.place.world_size
        self._dataset, self._process, self._mailbox = dataset, process, mailbox
        self._batch_size, self._mode, self._names, self._convert = batch_size, mode, tuple(names), convert
        self._checkpoint, self._options = checkpoint, options
        self._state: Mapping[str, Any] | None = None  # to continue
        self._continues = checkpoint is not None  # whether there may be a state to continue, on any rank
        self._session: JobSession | None = None  # on rank 0
        self._states: Mapping[str, Any] | None = None  # of the attached objects of the job that this one continues
        self._attached = AttachedObjects()
        self._next_epoch: int | None = None
        self._rest: int | None = None  # an epoch of which another job has trained on a part
        self._length: int | None = None
        self._epoch: EpochBatches | None = None
        self._progress = Progress()
        self._waits = False  # whether the epoch has begun before the loop asked for it
        self._closed = False
        self._pid = os.getpid()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a batch, in their order."""
        return self._names

    @property
    def next_epoch(self) -> int:
        """Number of the epoch that the loop gets next. It opens the session."""
        return self._opened() - self._waits

    def __len__(self) -> int:
        """Number of batches of this rank in the current epoch, or in the first one; the same on all ranks.

        It changes between epochs only with an assignment of chunks, and after an epoch that another job began.
        """
        if self._length is None:
            self._begin(2)
            self._waits = True
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
            If another rank has failed.
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
        self._attached.attach(objects, self._states)

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
            epoch = None if self._waits else self._epoch
            number, n_batches = (self._progress.epoch + 1, 0) if epoch is None else (epoch.number, epoch.n_trained)
            return {"rank": self.rank, "epoch": number, "batches": n_batches}
        self._opened()
        assert self._session is not None
        return self._state_dict(self._session, has_model=True)

    def _state_dict(self, session: JobSession, *, has_model: bool) -> dict[str, Any]:
        epoch = None if self._waits else self._epoch
        n_batches, is_complete = (0, False) if epoch is None else (epoch.n_trained, epoch.is_complete)
        with self._job_errors():
            states = self._attached.states()
            return session.state_dict(states, n_batches, is_complete=is_complete, has_model=has_model)

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
        if self._next_epoch is not None or self._attached.names:
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
            assert self._session is not None
            self._session.save(self._state_dict(self._session, has_model=False))

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

    def _opened(self) -> int:
        """Open the session, or wait until rank 0 has opened it; the number of the next epoch."""
        if os.getpid() != self._pid:
            raise other_process()
        if self._closed:
            raise ClusterError("this loader is closed. Make a new one", transient=False)
        if self._next_epoch is None:
            check_process_group(self.world_size)  # libraries such as Lightning make it after the loader
            if self._process.job is not None:
                self._open(self._process)
            opened = self._mailbox.wait_opened()
            self._next_epoch, self._rest = opened.next_epoch, opened.next_epoch if opened.is_rest else None
            self._states = unpickled(opened.attached)
            if self._states is not None and self._attached.names:
                raise ClusterError(
                    f"rank {self.rank} has attached objects that did not get the states of the job that this one "
                    "continues. Call load_state_dict on all ranks, before attach",
                    transient=False,
                )
        return self._next_epoch

    def _open(self, process: RankProcess) -> None:
        assert process.job is not None
        self._check_job()  # a session would wait for the workers of ranks that are gone
        with self._job_errors():
            self._session = JobSession(
                process.address,
                process.security,
                self._dataset,
                self.world_size,
                self._checkpoint,
                self._state,
                self._options,
            )
            process.job.on_failure = self._session.cancel
            self._check_job()  # it may have failed before it knew this function
            is_rest = self._session.is_rest
        shuffler = self._session.shuffler
        process.call(process.job.open, shuffler.next_epoch, is_rest, pickled(shuffler.attached))

    def _epochs(self, total: int) -> Iterator[EpochBatches]:
        self._opened()
        if missing := set(self._states or ()) - self._attached.names:
            names = ", ".join(sorted(missing))
            logger.warning("dshuffle: the state that this job continues has %s, which was not attached", names)
        while (number := self.next_epoch) < total:
            if self._session is not None:
                self._process.tell_job("begin", number)
            if self._waits:
                self._waits = False
            else:
                self._begin(total - number)
            assert self._epoch is not None
            yield self._epoch
        if not self._waits:
            self._end_epoch()

    def _begin(self, count: int) -> None:
        """Begin the next epoch, of a number of epochs that are to come."""
        number = self._opened()
        self._give_back()
        if self._session is not None:
            with self._job_errors():
                self._session.begin_epoch(count, self._fail_for)
        partition = self._mailbox.take(number)
        batching = batching_of(partition, self._batch_size, self._mode, is_rest=number == self._rest)
        self._epoch = EpochBatches(partition, batching, self._names, self._mailbox, self._convert)
        self._mailbox.set_batches(self._epoch)
        self._next_epoch, self._length = number + 1, len(batching)

    def _end_epoch(self) -> None:
        if self._epoch is None:
            return
        self._give_back()
        self._epoch = None
        if self._session is not None:
            self._process.tell_job("release")
            with self._job_errors():
                self._session.end_epoch()

    def _give_back(self) -> None:
        """Give the partition of the current epoch back. The states of attached objects are those of its end."""
        self._mailbox.check()
        epoch = self._epoch
        if epoch is None:
            return  # a partition that is there belongs to the first epoch, which this rank has not begun
        self._progress = Progress(epoch.number, epoch.n_given, len(epoch))
        self._process.say_progress(self._progress, has_left=False)  # before the task ends, so that it comes earlier
        if self._session is not None:
            if epoch.n_given < len(epoch):
                logger.warning(
                    "dshuffle: the loops of all ranks have left epoch %d after %d of its %d batches. The other samples "
                    "were not trained on in this epoch",
                    *(epoch.number, epoch.n_given, len(epoch)),
                )
            if self._attached.names:
                self._session.shuffler.attach(self._attached.states(), epoch.number)
        self._mailbox.give_back()

    def _fail_for(self, worker: str, reason: str) -> None:
        """Let the job fail because of a worker's task, unless it has failed or ended already. In any thread."""
        self._process.tell_job("task_failed", worker, reason)

    @contextlib.contextmanager
    def _job_errors(self) -> Iterator[None]:
        """Raise the reason for which the job has failed in place of what the session makes of it."""
        try:
            yield
        except (DShuffleError, CancelledError, OSError) as error:
            try:
                self._check_job()
            except DShuffleError as failure:
                raise failure from error
            raise

    def _check_job(self) -> None:
        """Raise an error if the job has failed; on rank 0, also if the message for this rank is still on its way."""
        if self._process.job is not None and self._process.job.failure is not None:
            self._mailbox.post_failure(self._process.job.failure)
        self._mailbox.check()

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
            self._leave_with(error)

    def _leave(self) -> None:
        """Wait until all ranks have left their loops, and close the session on rank 0."""
        process, mailbox, session = self._process, self._mailbox, self._session
        epoch = None if self._waits else self._epoch  # the loop did not get an epoch that waits
        mailbox.check()
        if epoch is not None:
            self._progress = Progress(epoch.number, epoch.n_trained, len(epoch), epoch.is_complete)
        process.say_progress(self._progress, has_left=True)
        if process.job is None:
            mailbox.wait(lambda: mailbox.ended, "for all ranks to leave their loops")
            return
        process.tell_job("leave", -1 if self._next_epoch is None else self._next_epoch - 1)
        pause = LOG_AFTER
        while not process.run(process.job.wait_until_left(pause)):
            ranks = ", ".join(map(str, process.job.present[:8]))
            logger.warning("dshuffle: rank 0 has left its loop, and waits for these ranks: %s", ranks)
            pause *= 2
        self._check_job()
        if session is not None:
            if epoch is not None and epoch.is_complete:
                self._end_epoch()
            elif self._epoch is not None:
                if epoch is not None and self._checkpoint is not None:
                    session.save(self._state_dict(session, has_model=False))
                process.tell_job("release")
            with self._job_errors():
                session.close()
            self._session = None
        process.tell_job("end")

    def _leave_with(self, error: BaseException | None) -> None:
        """Tell the other ranks of an error, and close everything, without waiting for anybody."""
        if error is not None and not self._mailbox.job_knows:
            reason = f"{type(error).__name__}: {error}"
            self._process.say_failed(reason)
            self._mailbox.fail(rank_failed(self.rank, self.world_size, reason))
        try:
            if self._session is not None and error is not None:
                self._session.drop(error)
        finally:
            self._process.close(failed=error is not None)
