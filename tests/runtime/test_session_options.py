"""The options of a session are one value, from the keywords of a shuffler to the workers."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np

from dshuffle import Choices, Shuffler, create_dataset
from dshuffle.runtime.session_spec import PLUGIN, SessionOptions

NAMES = [field.name for field in dataclasses.fields(SessionOptions)]


EARLIER_STATE = {
    "format": 3,
    "draw_version": 3,
    "n_samples": 60,
    "choices": {
        "assignment": "partial:0.5",
        "delivery": "storage",
        "caching": "uniform",
        "cache_fraction": None,
        "relay": "pipelined",
        "sharding": "random",
        "balance": "",
        "every": 1,
        "between": "redraw",
        "seed": 7,
        "shares": "even",
    },
    "sharding_checksum": None,
    "n_broadcast": 0,
    "n_workers": 3,
    "changes": [],
    "first_weights": [],
    "epoch": 1,
    "trained": [[4, 4, 4]],
    "trained_digest": [12, 326, 11049672882498104904, 13001715445827825543],
    "trained_weights": [],
    "attached": None,
}
"""State of a session of 3 workers that an earlier revision wrote (protocol 35), without the dataset's identity."""

LEFT = [
    [16, 25, 56, 7, 38, 1, 48, 26, 5, 19, 31, 9, 0, 41, 17, 24],
    [10, 33, 30, 2, 39, 49, 42, 23, 50, 4, 34, 3, 58, 11, 35, 53],
    [55, 47, 32, 28, 54, 14, 45, 40, 51, 57, 15, 29, 52, 44, 6, 36],
]
"""What that revision trained on in the rest of the epoch, by rank."""


def test_the_keywords_of_a_shuffler_are_its_choices_and_its_options():
    parameters = inspect.signature(Shuffler).parameters
    keywords = [name for name in parameters if not name.startswith("_")]
    choices = {field.name for field in dataclasses.fields(Choices)}
    assert len({*choices, *NAMES}) == len(choices) + len(NAMES)
    assert set(keywords) == {"client", "dataset", "checkpoint", "first_epoch", *choices, *NAMES}
    defaults = {field.name: field.default for field in dataclasses.fields(SessionOptions)}
    assert {name: parameters[name].default for name in NAMES} == defaults


def test_all_participants_have_the_options_and_an_earlier_state_goes_on(client_of, tmp_path):
    arrays = {"x": np.arange(60), "y": np.arange(60) % 3}
    dataset = create_dataset(str(tmp_path / "d.zarr"), arrays)
    state = {**EARLIER_STATE, "dataset": dataset.identity}
    expected = SessionOptions(on_loss="raise", memory_limit=2**20)
    with (
        client_of(3) as client,
        Shuffler.resume(client, dataset, state, on_loss="raise", memory_limit="1 MiB") as shuffler,
    ):
        (epoch,) = shuffler.epochs(1)
        assert epoch.number == 1
        assert client.gather(epoch.map(lambda partition: partition["x"].tolist())) == LEFT

        def options_here(dask_worker):
            (session,) = dask_worker.plugins[PLUGIN].sessions.values()
            return session.spec.options

        assert list(client.run(options_here).values()) == [expected] * 3
