"""The Dask task that calls a user's function on a worker's partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import get_worker

from dshuffle.errors import InvalidParameter, WorkerLost
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.session_spec import PLUGIN
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker


def run_on_partition(
    session_id: str,
    rank: int,
    epoch: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``fn`` on the partition of this worker; the Dask task behind :meth:`dshuffle.Epoch.map`."""
    plugin = get_worker().plugins.get(PLUGIN)
    sessions = plugin.sessions if isinstance(plugin, DShuffleWorker) else None
    session = None if sessions is None else sessions.of_rank(session_id, rank)
    if session is None:
        cause = None if sessions is None else sessions.cause(session_id)
        if cause is not None:
            raise cause.raised_by(f"the task of rank {rank} cannot run")
        raise WorkerLost(
            f"worker {get_worker().address} does not hold rank {rank} of session {session_id}: the session was closed, "
            "or another worker has taken the rank. If the session has ended, make a new Shuffler"
        )
    access = session.partition(epoch)
    del session  # Dask keeps the traceback of an error, and with it this frame
    with access as partition:
        try:
            result = fn(partition, *args, **kwargs)
        except AssertionError as error:
            if "daemonic processes" not in str(error):
                raise
            raise InvalidParameter.because(
                getattr(fn, "__name__", "fn"),
                "a Dask worker cannot start processes of its own, such as those of a DataLoader",
                "Use num_workers=0: the rows are in this process's memory already.",
            ) from error
    if isinstance(result, Partition):
        raise TypeError("a Partition cannot be sent to another process; return arrays instead")
    return result
