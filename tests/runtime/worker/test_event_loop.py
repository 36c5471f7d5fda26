"""While an exchange runs, event loops stay free and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset

pytestmark = pytest.mark.slow

MIB = 2**20
ROW_NBYTES = 1000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """150 MB in rows of 1,000 bytes."""
    x = np.random.default_rng(0).integers(0, 2**62, (150_000, 125))
    return create_dataset(str(tmp_path_factory.mktemp("large") / "d.zarr"), {"x": x})


@pytest.mark.parametrize("delivery", ["peer", "server", "storage"])
def test_no_callback_holds_an_event_loop(processes, large, delivery):
    def watch():
        """From now on, note the CPU time of the slowest callback of any event loop of this process."""
        import asyncio
        import gc
        import time

        gc.disable()  # the scheduler shares its process with the tests, whose objects take long to collect
        run = asyncio.Handle._run
        slowest = [(0.0, "")]

        def measured(handle):
            started = time.thread_time()
            run(handle)
            seconds = time.thread_time() - started
            if seconds > slowest[0][0]:
                slowest[0] = seconds, repr(handle)

        def end():
            asyncio.Handle._run = run
            gc.enable()
            return slowest[0]

        asyncio.Handle._run = measured
        asyncio.end_watch = end

    def end_watch():
        import asyncio

        return asyncio.end_watch()

    with Shuffler(processes, large, delivery=delivery) as shuffler:
        assert len(list(shuffler.epochs(2))) == 2
        processes.run(watch)
        processes.run_on_scheduler(watch)
        assert len(list(shuffler.epochs(3))) == 3
        found = processes.run(end_watch)
        found["scheduler"] = processes.run_on_scheduler(end_watch)
    print(found)
    assert len(found) == 4
    assert all(seconds < 0.1 for seconds, _ in found.values()), found
    assert all(seconds > 0 for seconds, _ in found.values())


@pytest.mark.parametrize("delivery", ["peer", "storage"])
def test_an_exchange_needs_little_more_memory_than_what_comes_in(new_processes, large, delivery):
    from distributed import Client

    def watch(dask_worker):
        import threading

        import psutil

        process, stop, peak = psutil.Process(), threading.Event(), [0]
        start = process.memory_info().rss

        def sample():
            while not stop.wait(0.003):
                peak[0] = max(peak[0], process.memory_info().rss)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()

        def end():
            stop.set()
            thread.join()
            return peak[0] - start

        dask_worker.end_watch = end

    with new_processes(3) as cluster, Client(cluster) as client, Shuffler(client, large, delivery=delivery) as shuffler:
        assert len(list(shuffler.epochs(1))) == 1  # loaded, and nothing is prefetched
        client.run(watch)
        assert len(list(shuffler.epochs(1))) == 1
        extra = client.run(lambda dask_worker: dask_worker.end_watch())
    print(extra)
    [record] = shuffler.records[1:]
    incoming = 50_000 * (ROW_NBYTES + 28)
    assert record.needed > 90_000
    assert all(peak < incoming + 128 * MIB for peak in extra.values()), {k: v / MIB for k, v in extra.items()}
    # Slots are touched when rows come in: a measure that sees nothing of that would prove nothing.
    assert all(peak > 0.5 * record.needed / 3 * ROW_NBYTES for peak in extra.values()), extra
