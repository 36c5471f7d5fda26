"""A worker that was lost because it was silent, and answers again, is taken back as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler
from dshuffle.runtime.scheduler.replacements import Replacements

HEARTBEAT = 2.0
STOPPED = 6.0
SETTINGS = {
    "dshuffle.heartbeat": f"{HEARTBEAT} s",
    "dshuffle.emulated-links": "30kbit",  # so that the exchange lasts while the worker is stopped
}


def slowly(partition: Any, log: str) -> list[int]:
    """Note that the task runs. The rest of it is run when a worker that was stopped goes on."""
    with open(log, "a") as file:
        file.write(f"{partition.epoch} {partition.rank}\n")
    if (partition.epoch, partition.rank) == (1, 1):
        for _ in range(40):
            time.sleep(0.1)
    return partition["y"].tolist()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("taken_back", [True, False])
def test_the_task_of_a_worker_that_was_stopped_runs_once(
    new_processes: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, taken_back: bool
) -> None:
    """It runs twice if the worker gets its rank like any other worker."""
    if not taken_back:

        async def as_any_other(*_: Any) -> bool:
            return False

        monkeypatch.setattr(Replacements, "_has_kept", as_any_other)
    log = tmp_path / "log"
    with dask.config.set(SETTINGS), new_processes(3) as cluster, Client(cluster) as client:
        process = client.run(os.getpid)
        with Shuffler(client, small) as shuffler:
            address = shuffler.addresses[1]
            for epoch in shuffler.epochs(3):
                futures = epoch.map(slowly, str(log))
                if epoch.number == 1:
                    while "1 1\n" not in log.read_text():
                        time.sleep(0.05)
                    os.kill(process[address], signal.SIGSTOP)
                    threading.Timer(STOPPED, os.kill, [process[address], signal.SIGCONT]).start()
                samples = np.concatenate(client.gather(futures))
                np.testing.assert_array_equal(np.sort(samples), np.arange(1000))
            assert shuffler.addresses[1] == address
    assert "has not answered" in caplog.text or "answers again" in caplog.text
    assert log.read_text().count("1 1\n") == (1 if taken_back else 2)
