"""What the system says of the process of a Dask worker.

A nanny runs this, so it loads little.
"""

from __future__ import annotations

from typing import Any

import psutil

HALTED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def worker_process_runs(dask_worker: Any) -> bool:
    """Return whether the process of a nanny's worker exists and is neither stopped nor ending."""
    pid = None if dask_worker.process is None else dask_worker.process.pid
    try:
        return pid is not None and psutil.Process(pid).status() not in HALTED
    except psutil.NoSuchProcess:
        return False
