"""The options of a session are one value, from the keywords of a shuffler to the workers."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Choices, Shuffler, create_dataset
from dshuffle.errors import InvalidParameter
from dshuffle.pipeline import Pipeline, Training
from dshuffle.planning import GivenSharding
from dshuffle.planning.cost import ClusterRates
from dshuffle.runtime.client.session_state import CHOOSING
from dshuffle.runtime.session_spec import PLUGIN, SessionOptions

from .conftest import OPTIONS
from .test_bad_input import PARAMETERS, cases

NAMES = [field.name for field in dataclasses.fields(SessionOptions)]

RATES = ClusterRates(n_workers=2, link_up=1e8, link_down=1e8)

EARLIER_STATE = {
    "format": 2,
    "draw_version": 3,
    "n_samples": 60,
    "choices": {
        "assignment": "partial:0.5",
        "delivery": "storage",
        "caching": "uniform",
        "cache_fraction": None,
        "relay": "pipelined",
        "sharding": "random",
        "balance": "y",
        "seed": 7,
    },
    "sharding_checksum": None,
    "n_broadcast": 0,
    "n_workers": 3,
    "changes": [],
    "epoch": 1,
    "trained": [[4, 4, 4]],
    "trained_digest": [12, 330, 8251254680339245447, 13025384651433819395],
    "attached": None,
}
"""State of a session of 3 workers that the release before wrote (protocol 24), without the dataset's identity."""

LEFT = [
    [16, 18, 25, 7, 33, 4, 26, 15, 2, 10, 39, 50, 29, 47, 55, 6],
    [59, 43, 12, 45, 0, 51, 42, 36, 34, 58, 11, 35, 24, 38, 28, 53],
    [54, 14, 40, 37, 19, 57, 56, 21, 30, 52, 31, 3, 41, 9, 8, 17],
]
"""What that release trained on in the rest of the epoch, by rank."""


def test_the_keywords_of_a_shuffler_are_its_choices_and_its_options() -> None:
    parameters = inspect.signature(Shuffler).parameters
    keywords = [name for name in parameters if not name.startswith("_")]
    choices = {field.name for field in dataclasses.fields(Choices)}
    assert len({*choices, *NAMES}) == len(choices) + len(NAMES)
    assert set(keywords) == {"client", "dataset", "checkpoint", "first_epoch", *choices, *NAMES}
    defaults = {field.name: field.default for field in dataclasses.fields(SessionOptions)}
    assert {name: parameters[name].default for name in NAMES} == defaults


def test_a_state_chooses_the_samples_and_nothing_else() -> None:
    names = {"assignment", "caching", "cache_fraction", "balance", "every", "between", "seed", "first_epoch"}
    assert names == CHOOSING


@pytest.mark.parametrize(("name", "value"), cases({name: PARAMETERS[name] for name in NAMES}))
def test_a_wrong_value_is_refused_where_the_options_are_made(name: str, value: Any) -> None:
    if value in ("nobody", ["nobody"]):  # only the scheduler knows the names of workers
        assert SessionOptions(**{name: value}).choice.is_restricted is (name == "workers")
        return
    keywords = {name: value}
    with pytest.raises(InvalidParameter) as caught:
        SessionOptions(**keywords)
    assert str(caught.value).startswith(f"{name}={value!r} is not allowed; it must be ")
    if name != "min_workers":
        with pytest.raises(InvalidParameter, match="is not allowed; it must be "):
            Pipeline("memory://not-opened", Training("linear_regression", step=0.1), session=keywords)


def test_options_that_contradict_each_other() -> None:
    for directory in (None, "local"):
        with pytest.raises(InvalidParameter, match=f"keep_cache=True .*={directory!r} does not outlive"):
            SessionOptions(keep_cache=True, cache_directory=directory)


def test_options_that_a_way_of_shuffling_contradicts() -> None:
    given = Choices(sharding=GivenSharding.of("given", np.zeros(10, int)))
    with pytest.raises(InvalidParameter, match="elastic is not allowed: the sharding 'given' was given"):
        SessionOptions(elastic=True).check_way(given)
    SessionOptions(elastic=True).check_way(Choices())
    SessionOptions().check_way(given)
    with pytest.raises(InvalidParameter, match=r"cluster=.*must be None with delivery='peer'"):
        SessionOptions(cluster=RATES).check_way(Choices())
    SessionOptions(cluster=RATES).check_way(Choices(delivery="auto"))


def test_values_as_users_write_them(tmp_path) -> None:
    keywords: dict[str, Any] = {"memory_limit": "2 KiB", "cache_directory": tmp_path, "server": 3, "elastic": True}
    options = SessionOptions(**keywords)
    assert (options.memory_limit, options.cache_directory, options.server) == (2048, str(tmp_path), "3")
    assert (options.on_loss, SessionOptions().on_loss, options.on_disk, SessionOptions().on_disk) == (
        "replace",
        "replace",
        True,
        False,
    )
    assert SessionOptions(**options.keywords()) == options
    assert pickle.loads(pickle.dumps(options)) == options
    assert SessionOptions().keywords() == {}


def test_a_pipeline_refuses_a_way_that_its_options_contradict_before_it_runs() -> None:
    create_dataset("memory://session-options", {"x": np.zeros((40, 2)), "y": np.zeros(40)}, overwrite=True)
    training = Training("linear_regression", step=0.1)
    pipeline = Pipeline("memory://session-options", training, shuffle=["local"], session={"cluster": RATES})
    with pytest.raises(InvalidParameter, match=r"this pipeline cannot run: local: cluster=.*delivery='peer'"):
        pipeline.check()


def test_all_participants_have_the_options_and_an_earlier_state_goes_on(tmp_path) -> None:
    arrays = {"x": np.arange(60), "y": np.arange(60) % 3}
    dataset = create_dataset(str(tmp_path / "d.zarr"), arrays)
    state = {**EARLIER_STATE, "dataset": dataset.identity}
    expected = SessionOptions(on_loss="raise", memory_limit=2**20)
    with (
        LocalCluster(n_workers=3, processes=False, memory_limit=0, **OPTIONS) as cluster,
        Client(cluster) as client,
        Shuffler.resume(client, dataset, state, on_loss="raise", memory_limit="1 MiB") as shuffler,
    ):
        (epoch,) = shuffler.epochs(1)
        assert epoch.number == 1
        assert client.gather(epoch.map(lambda partition: partition["x"].tolist())) == LEFT

        def options_here(dask_worker):
            (session,) = dask_worker.plugins[PLUGIN].sessions.values()
            return session.spec.options

        assert list(client.run(options_here).values()) == [expected] * 3
