"""What a worker process loads, in fresh processes."""

import json
import subprocess
import sys

import pytest

PERMUTED = """
import json, sys
import dask.array
import numpy as np
from dask.delayed import delayed
from distributed import Client, futures_of, wait
import dshuffle

def rows(begin):  # chunks that no function of dask.array makes
    return np.arange(begin, begin + 10)

def loaded():
    return sorted(sys.modules)

with Client(processes=True, n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
    chunks = [dask.array.from_delayed(delayed(rows)(10 * k), (10,), np.dtype(int)) for k in range(4)]
    whole = dask.array.concatenate(chunks)
    wait(client.persist(whole))
    without = client.run(loaded)
    permuted = dshuffle.permute(client, whole, 1)
    wait(permuted)
    result = np.concatenate(client.gather(futures_of(permuted)))
    assert result.tolist() == dshuffle.row_permutation(40, 1).tolist()
    print(json.dumps({worker: [modules, without[worker]] for worker, modules in client.run(loaded).items()}))
"""


@pytest.mark.slow
def test_an_exchange_in_memory_loads_no_formats_no_tables_and_no_compiler():
    ran = subprocess.run([sys.executable, "-c", PERMUTED], capture_output=True, text=True, check=True)
    loaded = json.loads(ran.stdout.splitlines()[-1])
    assert len(loaded) == 2
    for modules, without in loaded.values():
        assert "dshuffle.runtime.gather" in set(modules) - set(without)
        # Older releases of Dask load scipy.sparse to measure the size of a result. Numba loads scipy.linalg.
        absent = {"dask.array", "zarr", "numba", "scipy.linalg", "pandas", "sklearn", "xarray", "bokeh"}
        assert not absent & (set(modules) - set(without))


OPENED = """
import sys
import dshuffle, tempfile
import numpy as np
with tempfile.TemporaryDirectory() as folder:
    dshuffle.create_dataset(folder + "/x.zarr", {"x": np.ones((8, 2)), "y": np.ones(8, int)})
    dataset = dshuffle.open_dataset(folder + "/x.zarr")
    print(dataset.read_rows([3])["y"].tolist())
print("numba" in sys.modules)
"""


@pytest.mark.slow
def test_a_look_at_a_dataset_loads_no_compiler():
    ran = subprocess.run([sys.executable, "-c", OPENED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["[1]", "False"]
