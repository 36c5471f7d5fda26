"""Orders to close a session on workers that have lost their ranks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from dshuffle.runtime.scheduler.replacements import Closing

WORKER = "tcp://10.0.0.1:1"


def test_an_order_has_the_number_of_the_phase_in_which_it_was_decided() -> None:
    """The next phase may open the session on that worker again."""
    turn, orders = [6], []

    def rpc(address: str) -> Any:
        async def dshuffle_close(**fields: Any) -> dict[str, Any]:
            orders.append((address, fields["session_id"], fields["number"]))
            return {"status": "OK", "message": None}

        return SimpleNamespace(dshuffle_close=dshuffle_close)

    scheduler: Any = SimpleNamespace(rpc=rpc, workers={WORKER: None})
    spec: Any = SimpleNamespace(session_id="a", settings=SimpleNamespace(heartbeat=10.0))
    closing = Closing(scheduler, spec, lambda: turn[0])
    closing.given_up.add(WORKER)

    async def run() -> None:
        works = [closing.close_given_up(WORKER)]
        turn[0] = 7
        for work in works:
            await work
        await closing.close([WORKER])

    asyncio.run(run())
    assert orders == [(WORKER, "a", 6), (WORKER, "a", 7)]
