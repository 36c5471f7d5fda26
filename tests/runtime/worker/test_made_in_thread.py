"""What a thread makes for a caller that does not wait any more is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dshuffle.runtime.worker.disk import made_in_thread


class Maker:
    """Makes something once it may, and counts what is open."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.made: list[str] = []
        self.open: list[str] = []

    def make(self, name: str) -> str:
        self.begun.set()
        assert self.may_end.wait(10)
        if name == "nothing":
            raise ZeroDivisionError
        self.made.append(name)
        self.open.append(name)
        return name


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_the_caller_gets_it(executor: ThreadPoolExecutor) -> None:
    maker = Maker()
    maker.may_end.set()
    assert asyncio.run(made_in_thread(executor, maker.make, "it", close=maker.open.remove)) == "it"
    assert maker.open == ["it"]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(made_in_thread(executor, maker.make, "nothing", close=maker.open.remove))


@pytest.mark.parametrize("name", ["it", "nothing"])
def test_it_is_closed_if_the_caller_is_cancelled(executor: ThreadPoolExecutor, name: str) -> None:
    maker = Maker()

    async def main() -> None:
        first = asyncio.ensure_future(made_in_thread(executor, maker.make, name, close=maker.open.remove))
        waiting = asyncio.ensure_future(made_in_thread(executor, maker.make, "never", close=maker.open.remove))
        assert await asyncio.to_thread(maker.begun.wait, 10)
        for task in (first, waiting):
            task.cancel()
        await asyncio.wait([first, waiting])  # although the thread is not done
        assert first.cancelled()
        assert waiting.cancelled()
        maker.may_end.set()

    asyncio.run(main())
    executor.shutdown()
    assert maker.open == []
    assert maker.made == ([name] if name == "it" else [])
