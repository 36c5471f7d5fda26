"""Jobs in threads: all are done, in order of arrival, and short ones share a hand-over."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from dshuffle.errors import ExchangeError
from dshuffle.exchange.endpoints import TOGETHER_NBYTES, JobQueue


def play(scenario, n_threads=2):
    async def main():
        jobs = JobQueue(n_threads, "test-jobs")
        try:
            return await asyncio.wait_for(scenario(jobs), 10)
        finally:
            await jobs.close()

    return asyncio.run(main())


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("nbytes", [0, TOGETHER_NBYTES // 3, TOGETHER_NBYTES, 5 * TOGETHER_NBYTES])
def test_every_job_is_done_once_and_its_result_comes_back(n_threads, nbytes):
    async def scenario(jobs):
        return await asyncio.gather(*(jobs.run(lambda i=i: i * i, nbytes=nbytes) for i in range(50)))

    assert play(scenario, n_threads) == [i * i for i in range(50)]


def test_short_jobs_share_a_thread_and_long_ones_do_not():
    async def scenario(jobs):
        handed = []
        submit = jobs._executor.submit
        jobs._executor.submit = lambda work, group: (handed.append(len(group)), submit(work, group))
        await asyncio.gather(*(jobs.run(int, nbytes=TOGETHER_NBYTES // 10) for _ in range(20)))
        short, handed[:] = list(handed), []
        await asyncio.gather(*(jobs.run(int) for _ in range(5)))
        return short, handed

    short, long = play(scenario)
    assert short == [10, 10]
    assert long == [1] * 5


def test_an_error_is_that_of_its_own_job():
    async def scenario(jobs):
        def fail():
            raise ValueError("this one")

        calls = [jobs.run(fail if i == 3 else int, nbytes=1) for i in range(6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = play(scenario)
    assert [type(one) for one in found] == [int, int, int, ValueError, int, int]


def test_cancelled_jobs_are_skipped_and_closing_fails_the_rest():
    async def scenario(jobs):
        done, gate = [], threading.Event()
        first = jobs.run(gate.wait, 10)
        await asyncio.sleep(0)
        skipped = jobs.run(done.append, "skipped")
        kept = jobs.run(done.append, "kept")
        skipped.cancel()
        gate.set()
        await first
        await kept
        gate.clear()
        first, never = jobs.run(gate.wait, 10), jobs.run(done.append, "never")
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(jobs.close())
        with pytest.raises(ExchangeError, match="session was closed"):
            await never
        assert not closing.done()  # the job that runs may still touch rows
        gate.set()
        await closing
        assert first.done()
        with pytest.raises(ExchangeError, match="session was closed"):
            await jobs.run(done.append, "too late")
        await first
        return done

    assert play(scenario, 1) == ["kept"]


def test_a_job_that_has_failed_is_freed_with_its_future():
    """Its error must not hold the frame that ran it, as that holds the job, and so the future with the error."""

    class Rows:
        pass

    def fail(rows: Rows) -> None:
        raise ValueError("no disk")

    async def scenario() -> None:
        jobs = JobQueue(1, "test")
        rows = Rows()
        alive, future = weakref.ref(rows), jobs.run(fail, rows)
        await asyncio.wait([future])
        assert isinstance(future.exception(), ValueError)
        del rows, future
        await jobs.close()
        for _ in range(500):
            if alive() is None:
                return
            await asyncio.sleep(0.01)  # the thread may not have ended its job
        pytest.fail("the job is still held")

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
