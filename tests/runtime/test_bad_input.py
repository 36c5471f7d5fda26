"""Every wrong kind of value of every parameter and setting: the error names it, the value, and what is allowed."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset, run_with_retries
from dshuffle.errors import CheckpointError, InvalidParameter

from .conftest import OPTIONS

DOCS = Path(__file__).parents[2] / "docs"

PARAMETERS: dict[str, list[Any]] = {
    "client": [None, 5, "tcp://10.0.0.1:8786"],
    "dataset": [None, 5, True, b"x", ["x.zarr"]],
    "assignment": [None, 5, True, "globall", []],
    "delivery": [None, 5, True, "post", ["peer"]],
    "caching": [5, True, "lru", []],
    "cache_fraction": [True, "half", -1, 0, 2, math.nan, []],
    "relay": [None, 5, True, "pigeon", []],
    "sharding": [None, 5, True, "sorted", b"random", {}],
    "balance": [5, True, "x", "", []],
    "every": [None, True, 0, -1, 1.5, "x", []],
    "between": [None, 5, True, "shuffle", []],
    "shares": [None, 5, True, "fast", "1,x", (), (1, 0), (1, -1), (1, math.nan), (1, math.inf), (True, 1), ("a", "b")],
    "seed": [None, True, 1.5, "x", []],
    "first_epoch": [None, True, -1, 1.5, "x", []],
    "on_loss": [5, 0, True, False, "", "x", []],
    "checkpoint": [5, True, "", b"run.json", [], "s3://bucket"],
    "memory_limit": [True, 0, -1, 1.5, math.nan, math.inf, "", "x", "GiB", b"2 GiB", []],
    "cache_directory": [5, True, "", "scratch", Path("scratch"), b"/scratch", []],
    "keep_cache": [None, 5, "yes", []],
    "server": [True, 1.5, "nobody", b"0", []],
    "workers": [5, True, "0", [], {}, [True], [""], [1.5], ["nobody"]],
    "resources": [5, True, "GPU=1", [], {}, {"GPU": 0}, {"GPU": True}, {"GPU": "1"}, {"GPU": math.inf}, {"": 1}],
    "cluster": [5, True, "x", []],
    "elastic": [None, 5, "yes", []],
    "min_workers": [None, True, 0, -1, 1.5, "x", []],
}

NO_TIME: list[Any] = [None, True, -5, 0, math.nan, math.inf, "", "x", "s", "5 minits", []]
NO_SIZE: list[Any] = [None, True, -5, 0, 1.5, "", "x", "MiB", []]
NO_SWITCH: list[Any] = [None, 1, "no", []]
NO_RATE: list[Any] = [True, 5, 0, -1, "", "x", "5", "-1gbit", []]

SETTINGS: dict[str, list[Any]] = {
    "dshuffle.message-bytes": NO_SIZE,
    "dshuffle.window-bytes": NO_SIZE,
    "dshuffle.shared-memory": NO_SWITCH,
    "dshuffle.timeout": NO_TIME,
    "dshuffle.heartbeat": NO_TIME,
    "dshuffle.stopped-timeout": NO_TIME,
    "dshuffle.replacement-timeout": NO_TIME,
    "dshuffle.new-workers": NO_SWITCH[1:],  # None: whether the cluster is adaptive
    "dshuffle.paused-timeout": NO_TIME,
    "dshuffle.memory-fraction": [None, True, 0, -1, 1.5, math.nan, "", "x", []],
    "dshuffle.emulated-links": NO_RATE,
    "dshuffle.emulated-store": NO_RATE,
}

RETRYING: dict[str, list[Any]] = {
    "attempts": [None, True, 0, 1.5, "x"],
    "min_workers": [None, True, 0, 1.5, "x"],
    "patience": [None, True, -1, math.nan, "", "x", "5 minits", []],
    "checkpoint": [None, 5, "", "s3://bucket"],
    "dataset": [None, 5],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}-{value!r}") for name in table for value in table[name]]


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=2, processes=False, memory_limit=0, **OPTIONS) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def dataset():
    arrays = {"x": np.arange(100.0), "y": np.arange(100)}
    return create_dataset("memory://bad-input", arrays, overwrite=True)


def test_all_parameters_and_settings_are_here():
    names = {name for name in inspect.signature(Shuffler).parameters if not name.startswith("_")}
    assert PARAMETERS.keys() == names
    text = (DOCS / "settings.md").read_text()
    assert SETTINGS.keys() == set(re.findall(r"^\| `(dshuffle\.[a-z-]+)`", text, re.MULTILINE))


@pytest.mark.parametrize(("name", "value"), cases(PARAMETERS))
def test_a_wrong_value_of_a_parameter(client, dataset, name, value):
    keywords: dict[str, Any] = {"client": client, "dataset": dataset, name: value}
    if name == "cluster":
        keywords["delivery"] = "auto"
    with pytest.raises(InvalidParameter) as caught:
        Shuffler(**keywords)
    assert str(caught.value).startswith(f"{name}={value!r} is not allowed; it must be "), caught.value
    assert not caught.value.transient


@pytest.mark.parametrize(("name", "value"), cases(SETTINGS))
def test_a_wrong_value_of_a_setting(client, dataset, name, value):
    with dask.config.set({name: value}), pytest.raises(InvalidParameter) as caught:
        Shuffler(client, dataset)
    assert f"{name}={value!r} is not allowed; it must be " in str(caught.value)


@pytest.mark.parametrize(("name", "value"), cases(RETRYING))
def test_a_wrong_value_of_a_parameter_of_retrying(client, dataset, name, value):
    keywords: dict[str, Any] = {"dataset": dataset, "checkpoint": "memory://bad-input-state/run.json", name: value}
    with pytest.raises(InvalidParameter) as caught:
        run_with_retries(lambda shuffler: pytest.fail("it must not train"), lambda: client, **keywords)
    assert str(caught.value).startswith(f"{name}={value!r} is not allowed; it must be "), caught.value


@pytest.mark.slow
def test_a_wrong_rate_of_a_worker_is_its_error(tmp_path):
    """Workers read rates in their own processes."""
    copy = create_dataset(tmp_path / "d.zarr", {"x": np.arange(10.0)})
    with LocalCluster(n_workers=1, processes=True, **OPTIONS) as cluster, Client(cluster) as client:
        client.run(lambda: dask.config.set({"dshuffle.emulated-links": "fast"}))
        with pytest.raises(
            InvalidParameter, match=r"^rank 0 \(tcp://.*: dshuffle.emulated-links='fast' is not allowed"
        ):
            Shuffler(client, copy)


@pytest.mark.parametrize(
    ("choices", "trained"),
    [
        ({}, [[51, 0]]),
        ({}, [[20, 0], [31, 0]]),  # each is possible, both are not
        ({}, [[35, 0, 0], [10, 10]]),
        ({"assignment": "chunks:40"}, [[61, 0]]),  # chunks of 40, 40 and 20 samples: 60 at most
    ],
)
def test_a_state_with_more_samples_than_a_rank_has(client, dataset, choices, trained):
    with Shuffler(client, dataset, **choices) as shuffler:
        state = shuffler.state_dict()
    state["trained"] = trained
    with pytest.raises(CheckpointError, match=r"the state is damaged .*trained=.*at most \d+ samples of each rank"):
        Shuffler.resume(client, dataset, state)


def test_a_state_with_all_samples_that_a_rank_has(client, dataset):
    with Shuffler(client, dataset, assignment="chunks:40") as shuffler:
        state = shuffler.state_dict()
        sizes = client.gather(next(shuffler.epochs(1)).map(len))
    assert sorted(sizes) == [40, 60]
    state["trained"] = [[60 * (size == 60) for size in sizes]]
    with Shuffler.resume(client, dataset, state) as shuffler:
        epoch = next(shuffler.epochs(1))
        assert epoch.number == 0
        assert client.gather(epoch.map(len)) == [40 * (size == 40) for size in sizes]
