"""While a worker closes, other workers may read its partitions."""

from __future__ import annotations

import asyncio
import logging

from distributed import Worker

from dshuffle.errors import DShuffleError
from dshuffle.runtime.replies import message_in, within

logger = logging.getLogger(__name__)

HAND_OVER_WITHIN = 20.0
"""Seconds for which a worker that closes sends its partitions. Batch systems kill it half a minute after SIGTERM."""

ASK_EVERY = 0.2
"""Seconds between its questions whether it is still needed."""

ANSWER_WITHIN = 3.0
"""Seconds in which the scheduler must answer them. It may be closing as well."""


async def hand_over(worker: Worker) -> None:
    """Wait until nobody reads the partitions of a worker that closes any more."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HAND_OVER_WITHIN
    is_read = True
    while is_read and loop.time() < end:
        try:
            call = within(ANSWER_WITHIN, worker.scheduler.dshuffle_retiring(address=worker.address))
            is_read = message_in(await call, bool, "the scheduler")
        except (OSError, DShuffleError) as error:
            logger.debug("dshuffle: the scheduler does not take this worker's partitions: %s", error)
            return
        if is_read:
            if (heartbeat := worker.periodic_callbacks.get("heartbeat")) is not None:
                heartbeat.stop()  # the scheduler may have removed this worker, and would tell it to close
            await asyncio.sleep(ASK_EVERY)
