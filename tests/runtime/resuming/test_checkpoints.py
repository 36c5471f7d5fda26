"""Checkpoints are written in every epoch, and those that cannot be resumed are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dshuffle import Shuffler
from dshuffle.errors import CheckpointError, InvalidParameter

from .stopping import trained

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("scheme", ["path", pytest.param("memory", marks=pytest.mark.slow)])
def test_a_checkpoint_is_written_at_the_start_of_every_epoch(clusters, labelled, tmp_path, scheme):
    url = str(tmp_path / "run.json") if scheme == "path" else "memory://checkpoints/run.json"
    with Shuffler(clusters[3], labelled, checkpoint=url, seed=9) as shuffler:
        for epoch in shuffler.epochs(3):
            trained(clusters[3], epoch, [None] * 3)
    with pytest.raises(CheckpointError, match=r"there is a checkpoint at .*, of epoch 3"):
        Shuffler(clusters[3], labelled, checkpoint=url)
    with Shuffler.resume(clusters[4], labelled, url, seed=9) as shuffler:
        assert list(shuffler.epochs(0)) == []
        epoch = next(shuffler.epochs(1))
        assert (epoch.number, shuffler.choices.seed) == (3, 9)
        trained(clusters[4], epoch, [4] * 4)
        shuffler.save(url)
    with Shuffler.resume(clusters[3], labelled, url) as shuffler:
        assert sum(map(len, trained(clusters[3], next(shuffler.epochs(1)), [None] * 3))) == 700 - 4 * 24


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: text.replace('"epoch": 0', '"epoch": 7'), "damaged: its checksum is wrong"),
    ],
)
def test_a_damaged_checkpoint(clusters, labelled, written, damage, message):
    text = written.read_text()
    assert damage(text) != text
    written.write_text(damage(text))
    with pytest.raises(CheckpointError, match=f"run.json is {message}"):
        Shuffler.resume(clusters[3], labelled, written)


CHANGE = {"carried": 0, "n_before": 2, "weights": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "the state has format 1 and draw version"),
        ({"draw_version": 1}, "and draw version 1, and this release of dshuffle has"),
        ({"dataset": "another"}, "belongs to another dataset"),
        ({"n_samples": 699}, "belongs to another dataset"),
        ({"trained": [[1.5]]}, "damaged"),
        ({"epoch": -1}, "damaged .*epoch=-1"),
        ({"epoch": "0"}, "damaged .*epoch='0' is not allowed"),
        ({"trained": [[1000, 0, 0]]}, "damaged .*trained="),
        ({"trained": [[-1]]}, "damaged .*trained="),
        ({"trained": [3]}, "damaged"),
        ({"choices": {}}, "damaged"),
        ({"choices": None}, "damaged"),
        ({"n_workers": 0}, "damaged .*n_workers=0 is not allowed"),
        ({"changes": [1]}, "damaged"),
        (
            {"changes": [{"epoch": 0, "carried": 0, "n_before": 2, "former": [0, 1], "weights": []}]},
            "damaged .*n_workers=3",
        ),
        (
            {"changes": [{"epoch": 5, "carried": 5, "n_before": 2, "former": [0, 1, -1], "weights": []}]},
            "damaged .*epoch=0 .*>= 5",
        ),
    ],
    ids=str,
)
def test_a_state_that_cannot_be_resumed(clusters, labelled, written, changes, message):
    state = json.loads(written.read_text())["state"]
    with pytest.raises(CheckpointError, match=message):
        Shuffler.resume(clusters[3], labelled, {**state, **changes})
    for name in changes:
        with pytest.raises(CheckpointError, match=f"damaged .KeyError: '{name}'"):
            Shuffler.resume(clusters[3], labelled, {key: value for key, value in state.items() if key != name})


def test_an_attached_value_takes_as_many_bytes_as_its_pickle(clusters, labelled, tmp_path):
    model = np.random.default_rng(0).random(100_000)
    place = tmp_path / "run.json"
    with Shuffler(clusters[3], labelled) as shuffler:
        shuffler.attach(model)
        shuffler.save(place)
    assert place.stat().st_size < model.nbytes + 5000
    with Shuffler.resume(clusters[3], labelled, place) as shuffler:
        np.testing.assert_array_equal(shuffler.attached, model)
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged: its checksum is wrong"):
        Shuffler.resume(clusters[3], labelled, place)


def test_a_state_that_the_user_has_written(clusters, labelled, written):
    own = json.loads(written.read_text())["state"]
    written.write_text(json.dumps(own))
    for state in (own, written):
        with Shuffler.resume(clusters[3], labelled, state) as shuffler:
            assert sum(shuffler.state_dict()["trained"][0]) == 72


@pytest.mark.parametrize("option", [{"seed": 1}, {"assignment": "local"}, {"first_epoch": 3}, {"every": 3}])
def test_options_that_contradict_the_state(clusters, labelled, written, option):
    [(name, value)] = option.items()
    with pytest.raises(InvalidParameter, match=f"{name}={value!r} is not allowed; it must be left out, or"):
        Shuffler.resume(clusters[3], labelled, written, **option)
