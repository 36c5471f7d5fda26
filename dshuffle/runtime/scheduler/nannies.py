"""Signs of life of workers whose own event loop does not answer.

A task may hold the interpreter's global lock for minutes, in C code for example. Then its worker says nothing, although
nothing is lost. Its nanny is a process of its own, and knows whether the worker's process runs. Of a worker without a
nanny, the scheduler knows only whether it has a task, which may also be stopped.
"""

from __future__ import annotations

import logging

from distributed import Scheduler
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize
from distributed.scheduler import WorkerState

from dshuffle.process_state import worker_process_runs
from dshuffle.runtime.replies import within
from dshuffle.runtime.settings import Settings

ANSWER_WITHIN = 3.0
"""Seconds in which a nanny must answer."""

logger = logging.getLogger(__name__)


async def process_runs(scheduler: Scheduler, worker: WorkerState, silent_seconds: float, settings: Settings) -> bool:
    """Return whether a silent worker may be busy, by what others know of it."""
    if worker.nanny:
        return await nanny_says_it_runs(scheduler, worker)
    return bool(worker.processing) and silent_seconds < settings.stopped_timeout


async def nanny_says_it_runs(scheduler: Scheduler, worker: WorkerState) -> bool:
    """Return whether the nanny of a worker answers, and says that the worker's process runs."""
    try:
        call = scheduler.rpc(worker.nanny).run(function=dumps(worker_process_runs))
        reply = await within(ANSWER_WITHIN, call)
    except Exception as error:  # it may have another release of dshuffle, or none, and Dask raises what it raised
        logger.debug("dshuffle: the nanny of %s cannot say whether it runs: %r", worker.address, error)
        return False
    result = reply.get("result") if isinstance(reply, dict) else None
    return (deserialize(result.header, result.frames) if isinstance(result, Serialized) else result) is True
