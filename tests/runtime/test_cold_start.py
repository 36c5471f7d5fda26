"""What is loaded before the first session, and what a first session does one after the other."""

import json
import subprocess
import sys

import pytest

PRELOADED = """
import json, sys
from distributed import Client
from dshuffle.compare import local_cluster

def loaded():
    return sorted(sys.modules)

if __name__ == "__main__":
    with local_cluster(1) as client:
        print(json.dumps(list(client.run(loaded).values())))
"""


@pytest.mark.slow
def test_a_cluster_of_ours_loads_everything_while_its_workers_start(tmp_path):
    (tmp_path / "script.py").write_text(PRELOADED)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    workers = json.loads(ran.stdout.splitlines()[-1])
    assert len(workers) == 2  # one of them is the server
    needed = {"dshuffle.runtime.worker.worker_plugin", "numba", "zarr"}
    for modules in workers:
        assert needed <= set(modules)
        assert not {"dask.array", "pandas", "sklearn", "xarray", "bokeh"} & set(modules)


@pytest.mark.slow
def test_a_scheduler_loads_its_plugin():
    code = """
import asyncio, sys
from distributed import Scheduler

async def start():
    async with Scheduler(port=0, dashboard_address=":0", preload=["dshuffle"]):
        print("dshuffle.runtime.scheduler.scheduler_plugin" in sys.modules, "numba" in sys.modules)

asyncio.run(start())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"]
