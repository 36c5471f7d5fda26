"""Workers that may take a lost rank, and why others may not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Status

from dshuffle.runtime.scheduler.members import Candidates
from dshuffle.runtime.session_spec import EVERY_WORKER, PROTOCOL

WORKER = "tcp://10.0.0.7:1"


def scheduler_with(reply: Any) -> Any:
    """A scheduler with one worker, and its answer."""

    async def dshuffle_protocol() -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    worker = SimpleNamespace(address=WORKER, name="7", status=Status.running, resources={})
    return SimpleNamespace(workers={WORKER: worker}, rpc=lambda _: SimpleNamespace(dshuffle_protocol=dshuffle_protocol))


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"protocol": PROTOCOL, "is_set_up": True}, ""),
        ({"protocol": PROTOCOL, "is_set_up": False}, "is still being set up"),
        ({"protocol": 3, "is_set_up": True}, f"has another version of dshuffle (protocol 3, and not {PROTOCOL})"),
        (None, "is not set up for dshuffle"),
        (OSError("refused"), "does not answer (OSError: refused)"),
    ],
)
def test_why_a_worker_cannot_take_a_rank(reply: Any, reason: str) -> None:
    spec: Any = SimpleNamespace(addresses={}, choice=EVERY_WORKER)

    async def find() -> None:
        candidates = Candidates(scheduler_with(reply), spec)
        worker, why_unfit = await candidates.find("tcp://10.0.0.1:1", [], serves=False)
        assert (worker is None) is bool(reason)
        assert why_unfit == (f"{WORKER} {reason}" if reason else "")

    asyncio.run(find())
