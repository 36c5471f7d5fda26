"""Planning is pure: importing it must not load the runtime's libraries."""

import subprocess
import sys


def test_planning_loads_no_dask_no_zarr_and_no_numba():
    code = (
        "import sys, dshuffle.planning\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'numpy' in loaded\n"
        "print(sorted(loaded & {'dask', 'distributed', 'numba', 'scipy', 'zarr'}))"
    )
    # A fresh interpreter, because this one has loaded everything for other tests.
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
