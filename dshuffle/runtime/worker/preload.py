"""What ``--preload dshuffle`` loads while a worker or a scheduler starts, so that the first session finds it there."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time

from distributed import Worker
from distributed.core import Server

from dshuffle.kernels import load_kernels

logger = logging.getLogger(__name__)

OF_SCHEDULER = ("dshuffle.runtime.scheduler.scheduler_plugin",)
OF_WORKER = (
    "dshuffle.runtime.worker.worker_plugin",
    "dshuffle.runtime.gather.row_pieces",
    "dshuffle.store.dataset",
)
KERNELS = (
    *("rows", "exchange.cache_partition", "store.reader"),
    *("planning.types", "planning.randomness", "planning.remainder"),
)
"""Those of sessions with the default choices."""


async def load(server: Server) -> None:
    """Load the modules of a worker or a scheduler, and the kernels of a worker, before it is part of the cluster.

    Sessions whose choices need more kernels load these when they open.
    """
    is_worker = isinstance(server, Worker)
    began = time.perf_counter()
    await asyncio.to_thread(load_worker if is_worker else load_scheduler)
    logger.debug("dshuffle: preloaded in %.3f s", time.perf_counter() - began)


def load_scheduler() -> None:
    """Load the modules of a scheduler."""
    for name in OF_SCHEDULER:
        importlib.import_module(name)


def load_worker() -> None:
    """Load the modules and the kernels of a worker."""
    for name in OF_WORKER:
        importlib.import_module(name)
    load_kernels(*KERNELS)
