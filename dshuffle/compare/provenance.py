"""Context of a comparison (dataset, cluster, machine, versions), so that others can judge and repeat it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from distributed import Client

from dshuffle.redaction import hide_secrets
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.session_spec import only_serves
from dshuffle.store import Dataset
from dshuffle.units import human_bytes

PACKAGES = ("dshuffle", "dask", "distributed", "zarr", "numpy", "numba", "bokeh")


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the URL, the sizes and the arrays of a dataset."""
    arrays = {
        name: f"{info.dtype} {info.shape}, {info.chunk_rows} rows per chunk" for name, info in dataset.arrays.items()
    }
    return {
        "url": "a temporary folder" if dataset.is_temporary else hide_secrets(dataset.url),
        "samples": dataset.n_samples,
        "bytes a sample": dataset.row_nbytes,
        "size": human_bytes(dataset.n_samples * dataset.row_nbytes),
        **{f"array {name}": text for name, text in arrays.items()},
    }


def describe_cluster(client: Client) -> dict[str, Any]:
    """Return the workers of a cluster and the protocol between them."""
    information = cluster_info(client)
    workers = information["workers"].values()
    n_servers = sum(only_serves(worker["resources"]) for worker in workers)
    return {
        "workers that train": len(workers) - n_servers,
        "servers": n_servers,
        "hosts": len({worker["host"] for worker in workers}),
        "threads a worker": _range(worker["nthreads"] for worker in workers),
        "memory a worker": _range((worker["memory_limit"] for worker in workers), human_bytes),
        "protocol": urlsplit(information["address"]).scheme,
    }


def describe_machine() -> dict[str, Any]:
    """Return the system, cores and memory of the client's machine."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the results."""
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _range(values: Iterable[Any], name: Callable[[Any], Any] = lambda value: value) -> Any:
    ordered = sorted(values)
    least, greatest = name(ordered[0]), name(ordered[-1])
    return least if least == greatest else f"{least} to {greatest}"
