"""Parameters of a job that are refused before its ranks meet."""

from __future__ import annotations

import sys

import pytest

import dshuffle
from dshuffle.errors import InvalidParameter


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_loss": "replace"}, "on_loss is not allowed"),
        ({"elastic": True}, "elastic is not allowed"),
        ({"workers": ["0"]}, "workers is not allowed"),
        (
            {"shares": {"old-node": 2}},
            "ranks of a job have numbers, and no names. Give 'even', or numbers, one for each",
        ),
        ({"shares": "measured"}, "a step of the script waits for other ranks. Give 'even', or numbers, one for each"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"mode": "half"}, "mode='half'"),
        ({"arrays": ["z"]}, "arrays=['z']"),
        ({"arrays": "x"}, "arrays='x'"),
        ({"timeout": 0}, "timeout=0"),
        ({"security": "tls"}, "security='tls'"),
        ({"port": None}, "port=None is not allowed; it must be an integer if no launcher says"),
        ({"port": 70000}, "port=70000"),
        ({"rank": 2}, "rank=2 is not allowed; it must be below world_size=2"),
    ],
)
def test_bad_parameters(store, options, words):
    with pytest.raises(InvalidParameter) as error:
        dshuffle.spmd(store, **{"batch_size": 8, "rank": 0, "world_size": 2, "port": 1234, **options})
    assert words in str(error.value)


def test_a_device_without_torch(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    for name in ("device", "torch"):
        monkeypatch.delitem(sys.modules, f"dshuffle.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"PyTorch is not installed .*pip install 'dshuffle\[torch\]'.*whl/cpu"):
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=1, port=1234, device="cpu")


def test_an_unknown_parameter(store):
    with pytest.raises(TypeError, match="'asignment'"):
        dshuffle.spmd(store, batch_size=8, asignment="global")
