"""Waits until dshuffle is set up on all workers of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from distributed import Scheduler, Status

from dshuffle.errors import ClusterError
from dshuffle.runtime.replies import within
from dshuffle.runtime.scheduler.nannies import process_runs
from dshuffle.runtime.scheduler.training_workers import LEAVING
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker_choice import WorkerChoice, in_words

logger = logging.getLogger(__name__)

SETUP_TIMEOUT = 60.0
"""Seconds in which all workers must be set up."""

ASK_AGAIN = 0.5
"""Seconds after which workers are asked again, unless one says hello earlier."""


async def workers_set_up(
    scheduler: Scheduler,
    hello: asyncio.Event,
    settings: Settings,
    choice: WorkerChoice,
    fewest: int | None = None,
) -> dict[str, int | None]:
    """Wait until every worker that a session may have has set up the worker plugin.

    The scheduler asks the workers, so that it does not have to remember which worker sent a hello to which plugin. A
    hello only makes it ask immediately.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    hello
        Is set when a worker says hello.
    settings
        Settings of the session for which the workers are needed.
    choice
        The workers that the session may have.
    fewest
        Number of workers that suffice. Others that do not answer within a heartbeat, and are not busy, are then left
        out. By default all workers must answer.

    Returns
    -------
    dict
        Addresses of the workers that are set up and not paused, and how many open files each may have; None for any
        number.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(settings.timeout, SETUP_TIMEOUT)
    installed_again: set[str] = set()
    question = {"op": "dshuffle_protocol"}
    while True:
        hello.clear()
        if not scheduler.workers:
            raise ClusterError(
                "the cluster does not have any workers; start some and wait for them with client.wait_for_workers"
            )
        present = [
            address
            for address, worker in scheduler.workers.items()
            if worker.status not in LEAVING and choice.allows(worker)
        ]
        if not present:
            workers = list(scheduler.workers.values())
            raise ClusterError(
                f"none of the {len(workers)} workers of the cluster is one that the session may have (workers=, "
                f"resources=): {in_words(workers)}"
            )
        replies = await ask_all(scheduler, question, present, settings.heartbeat)
        late = {address: reply for address, reply in replies.items() if not _is_set_up(reply)}
        if not late:
            break
        if fewest is not None and len(replies) - len(late) >= fewest and await _are_silent(scheduler, late, settings):
            logger.warning("dshuffle: left out, because they do not answer: %s", ", ".join(sorted(late)))
            replies = {address: reply for address, reply in replies.items() if address not in late}
            break
        if loop.time() > deadline:
            raise _not_set_up(late, len(replies))
        # Only workers that surely lack the plugin: Dask would tear down one that is there, with its sessions.
        bare = [address for address, reply in late.items() if reply is None and address not in installed_again]
        second_replies = await ask_all(scheduler, question, bare, settings.heartbeat)
        bare = [address for address, reply in second_replies.items() if reply is None]
        if bare:
            installed_again.update(bare)
            message = {"op": "plugin-add", "plugin": scheduler.worker_plugins[PLUGIN], "name": PLUGIN}
            answers = await ask_all(scheduler, message, bare, settings.heartbeat)
            refusals = {address: reply for address, reply in answers.items() if _is_error(reply)}
            if refusals:
                raise _not_set_up(refusals, len(replies))
            continue
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hello.wait(), ASK_AGAIN)
    for address, reply in replies.items():
        if reply.get("protocol") != PROTOCOL:
            raise ClusterError(
                f"worker {address} uses protocol {reply.get('protocol')} and the scheduler uses protocol "
                f"{PROTOCOL}. Install the same version of dshuffle on both",
                transient=False,
            )
    return {address: replies[address].get("open_files") for address in _running(scheduler, replies)}


async def _are_silent(scheduler: Scheduler, replies: dict[str, Any], settings: Settings) -> bool:
    """Whether all of these workers have not answered, and none of them is known to be busy."""
    if not all(isinstance(reply, OSError) for reply in replies.values()):
        return False
    workers = [scheduler.workers[address] for address in replies if address in scheduler.workers]
    looks = (process_runs(scheduler, worker, settings.heartbeat, settings) for worker in workers)
    return not any(await asyncio.gather(*looks))


def _running(scheduler: Scheduler, addresses: Iterable[str]) -> set[str]:
    states = {address: scheduler.workers[address].status for address in addresses if address in scheduler.workers}
    running = {address for address, status in states.items() if status == Status.running}
    if not running:
        words = ", ".join(f"{address} ({states[address].name})" for address in sorted(states))
        raise ClusterError(
            f"none of the workers can run tasks: {words}. Dask pauses a worker that uses more than 80 % of its "
            "memory limit. Free memory on these workers, or start workers with a larger limit"
        )
    return running


async def ask_all(
    scheduler: Scheduler, message: dict[str, Any], addresses: Iterable[str], heartbeat: float
) -> dict[str, Any]:
    """Send a message to workers, and return the replies; a worker that does not answer in time has an error."""

    async def ask(address: str) -> tuple[str, Any]:
        reply: Any = scheduler.broadcast(msg=message, workers=[address], on_error="return")
        try:
            return address, (await within(heartbeat, reply))[address]
        except TimeoutError as error:
            return address, error

    return dict(await asyncio.gather(*map(ask, addresses)))


def _is_set_up(reply: Any) -> bool:
    # Releases with another protocol may lack this field. They are refused by name later.
    return isinstance(reply, dict) and "protocol" in reply and bool(reply.get("is_set_up", True))


def _is_error(reply: Any) -> bool:
    return isinstance(reply, dict) and reply.get("status") == "error"


def _not_set_up(replies: dict[str, Any], n_workers: int) -> ClusterError:
    address, reply = min(replies.items())
    reason = "the worker's log has the reason"
    advice = "Make sure that the worker runs and that the same version of dshuffle is installed there"
    if isinstance(reply, BaseException):
        reason = f"{type(reply).__name__}: {reply}"
    elif isinstance(reply, dict) and reply.get("is_set_up") is False:
        reason = "it still loads or compiles kernels"
        advice = "Run dshuffle warmup on its machine, or open the session again later"
    elif _is_error(reply):
        reason = f"{reply.get('exception_text', 'the plugin was refused')}"
    # Another attempt would install the same plugin on the same worker.
    return ClusterError(
        f"dshuffle could not be set up on {len(replies)} of {n_workers} workers, among them {address} ({reason}). "
        f"{advice}",
        transient=not _is_error(reply),
    )
