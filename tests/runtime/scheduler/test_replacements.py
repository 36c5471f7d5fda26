"""Workers that take lost ranks: what the log says of them, and what is closed on the workers before them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dshuffle.errors import CacheBudgetError
from dshuffle.runtime.messages import MemberState
from dshuffle.runtime.scheduler import replacements
from dshuffle.runtime.scheduler.machine import SessionMachine
from dshuffle.runtime.scheduler.machine_state import Phase
from dshuffle.runtime.scheduler.replacements import Replacements

from .machines import given_order, replacing_machine

FIRST, LOST, SPARE = "tcp://10.0.0.0:1", "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


class Closed:
    """Notes where sessions are closed."""

    def __init__(self) -> None:
        self.given_up: set[str] = set()
        self.whole: list[str] = []

    def close_given_up(self, address: str) -> None:
        self.whole.append(address)


def replacements_of(machine: SessionMachine, places: dict[int, str], addresses: list[str], closed: Closed) -> Any:
    """Replacements by the workers at these addresses, one after the other."""

    async def ask(*_: Any) -> MemberState:
        return MemberState(open=False)

    participants = SimpleNamespace(
        addresses=places, move=places.__setitem__, ask=ask, name_of="rank {}".format, retired={}, handed_over={}
    )
    next_address = iter(addresses)

    async def find(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(address=next(next_address))

    return Replacements(
        SimpleNamespace(workers=dict.fromkeys([FIRST, LOST, SPARE])),
        SimpleNamespace(session_id="session-7", options=SimpleNamespace(elastic=False), former=None),
        participants,
        SimpleNamespace(find=find, why_unfit="", remember=lambda worker: None, refuse=lambda address, for_good: None),
        machine,
        SimpleNamespace(
            run=lambda method, *arguments, **options: method(*arguments, now=0.0, **options), spawn=lambda work: None
        ),
        closed,
        is_followed=lambda: False,
        move_tasks=lambda: None,
    )


async def search_ends(machine: SessionMachine) -> None:
    async with asyncio.timeout(10):
        while machine.phase is Phase.WAITING:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("addresses", "refuses", "logged"),
    [
        ([LOST], False, ["answers again"]),
        ([SPARE], False, [f"is replaced by {SPARE}"]),
        ([SPARE, SPARE], True, [f"is replaced by {SPARE}", "could not take the rank before, and tries again"]),
        ([LOST, LOST], True, ["answers again", "could not take the rank before, and tries again"]),
        ([SPARE, LOST], True, [f"is replaced by {SPARE}", f"is replaced by {LOST}"]),
        ([SPARE, SPARE], False, [f"is replaced by {SPARE}", "answers again"]),
    ],
)
def test_the_log_says_how_a_worker_takes_a_rank(
    addresses: list[str],
    refuses: bool,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The workers at these addresses take rank 1 one after the other. It is lost again, or refused for lack of room."""
    monkeypatch.setattr(replacements, "TICK", 0.0)
    machine = replacing_machine(2)
    search = replacements_of(machine, {0: FIRST, 1: LOST}, addresses, Closed())

    async def run() -> None:
        machine.lost([1], "has left", 0.0)
        for number, address in enumerate(addresses):
            search.search()
            await search_ends(machine)
            if number + 1 < len(addresses) and refuses:
                search.refuse(1, address, for_good=False)
                machine.refused(given_order(machine, "restore", 1, 0), CacheBudgetError("no room here"), 0.0)
            elif number + 1 < len(addresses):
                machine.lost([1], "has left", 0.0)

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [f"dshuffle: rank 1 {words}" for words in logged]
