"""Workers that may take a lost rank, and what nannies say of silent workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Status

from dshuffle.process_state import worker_process_runs
from dshuffle.runtime.scheduler.members import Candidates, process_runs, why_unfit
from dshuffle.runtime.session_spec import EVERY_WORKER, PROTOCOL
from dshuffle.runtime.settings import Settings

WORKER = "tcp://10.0.0.7:1"


def scheduler_with(reply: Any) -> Any:
    """A scheduler with one worker, and its answer."""

    async def broadcast(*, workers: list[str], **_: Any) -> Any:
        return dict.fromkeys(workers, reply)

    worker = SimpleNamespace(address=WORKER, name="7", status=Status.running, resources={})
    return SimpleNamespace(workers={WORKER: worker}, broadcast=broadcast)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"protocol": PROTOCOL, "is_set_up": True}, ""),
        (
            {"protocol": PROTOCOL, "is_set_up": False},
            "still loads or compiles kernels (see dshuffle warmup)",
        ),
        ({"protocol": 3, "is_set_up": True}, f"has another version of dshuffle (protocol 3, and not {PROTOCOL})"),
        (None, "is not set up for dshuffle: its log has the reason"),
        (OSError("refused"), "does not answer (OSError: refused)"),
    ],
)
def test_why_a_worker_cannot_take_a_rank(reply: Any, reason: str) -> None:
    spec: Any = SimpleNamespace(addresses={}, choice=EVERY_WORKER)

    async def find() -> None:
        worker = await Candidates(scheduler_with(reply), spec).find("tcp://10.0.0.1:1", [], serves=False)
        assert (worker is None) is bool(reason)
        assert why_unfit(reply) == reason

    asyncio.run(find())


def scheduler_whose_nanny(answer):
    """A scheduler of which the nanny of every worker answers so."""

    async def run(function):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(rpc=lambda address: SimpleNamespace(run=run))


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        ({"status": "OK", "result": True}, True),
        ({"status": "OK", "result": False}, False),
        ({"status": "error"}, False),
        (None, False),
        (OSError("it is away"), False),
        (ModuleNotFoundError("No module named 'dshuffle.process_state'"), False),  # another release
    ],
)
def test_a_nanny_says_whether_the_process_runs(answer, runs):
    worker = SimpleNamespace(nanny="tcp://n:1", address="tcp://w:1", processing={"a task"})
    assert asyncio.run(process_runs(scheduler_whose_nanny(answer), worker, 6.0, Settings())) is runs


@pytest.mark.parametrize(
    ("processing", "seconds", "runs"), [({"a task"}, 59.0, True), ({"a task"}, 60.0, False), (set(), 1.0, False)]
)
def test_without_a_nanny_a_task_excuses_silence_for_some_time(processing, seconds, runs):
    worker = SimpleNamespace(nanny="", address="tcp://w:1", processing=processing)
    assert asyncio.run(process_runs(scheduler_whose_nanny(None), worker, seconds, Settings())) is runs


def test_a_process_that_has_ended_does_not_run():
    assert not worker_process_runs(SimpleNamespace(process=None))
    assert not worker_process_runs(SimpleNamespace(process=SimpleNamespace(pid=None)))
    assert not worker_process_runs(SimpleNamespace(process=SimpleNamespace(pid=2**22 + 1)))
