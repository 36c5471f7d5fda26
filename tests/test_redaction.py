"""Planted secrets: in a URL, and in storage options at any depth. None of them comes out anywhere."""

from __future__ import annotations

import json
import pickle
import traceback

import numpy as np
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.compare.comparison import describe_dataset
from dshuffle.errors import DShuffleError, InvalidParameter
from dshuffle.redaction import hide_secrets

PLANTED = ("planted-user", "planted-password", "planted-signature", "planted-deep")
URL = "memory://planted-user:planted-password@host/d.zarr?sig=planted-signature"


def clean(text: object) -> bool:
    return not any(secret in str(text) for secret in PLANTED)


@pytest.fixture
def dataset():
    return dshuffle.create_dataset(URL, {"x": np.arange(100.0), "y": np.arange(100) % 4}, overwrite=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://planted-user:planted-password@localhost:1/d.zarr",
        pytest.param("https://localhost:1/d.zarr?sv=1&sig=planted-signature&se=2", marks=pytest.mark.slow),
        pytest.param(
            "https://localhost:1/d.zarr?X-Amz-Signature=planted-signature&X-Amz-Security-Token=planted-deep",
            marks=pytest.mark.slow,
        ),
        "memory://planted-user:planted-password@nowhere/d.zarr",
    ],
)
def test_an_error_shows_neither_secrets_of_the_url_nor_of_the_options(url: str) -> None:
    options = {"client_kwargs": {"headers": {"Authorization": "planted-deep"}}} if url.startswith("https") else None
    with pytest.raises(DShuffleError) as caught:
        dshuffle.open_dataset(url, storage_options=options)
    assert clean(caught.value)
    assert clean(repr(caught.value))
    assert clean(repr(pickle.loads(pickle.dumps(caught.value))))
    assert clean("".join(traceback.format_exception(caught.value)))


def test_representations_and_reports_are_clean(dataset) -> None:
    assert clean(repr(dataset))
    assert clean(json.dumps(describe_dataset(dataset)))
    with (
        Client(n_workers=1, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, dataset) as shuffler,
    ):
        [epoch] = shuffler.epochs(1)
        shown = [repr(shuffler), shuffler._repr_html_(), repr(epoch)]
        shown.append(json.dumps([record.to_dict() for record in shuffler.records], default=str))
        assert all(map(clean, shown))


@given(st.text(alphabet="abcdefgh0123456789%+-_", min_size=4), st.sampled_from(["sig", "X-Amz-Signature", "api_key"]))
def test_parameters_of_urls(value: str, name: str) -> None:
    assert hide_secrets(f"GET https://h/p?a=1&{name}={value}&b=2") == f"GET https://h/p?a=1&{name}=***&b=2"


@pytest.mark.parametrize("length", range(50, 400, 7))
def test_a_shortened_text_has_no_part_of_a_secret(length):
    secret = "NSECRETTOKEN" * 60
    url = f"https://bucket/{'a' * length}?X-Amz-Date=2026&X-Amz-Security-Token={secret}&X-Amz-Signature={secret}"
    for value in (url, [url], {"url": url}):
        assert "SECRET" not in str(InvalidParameter.of("url", value, "something else"))


def test_values_of_secret_names_are_not_shown():
    text = str(InvalidParameter.of("storage_options", {"password": "hunter2", "region": "eu"}, "something else"))
    assert "hunter2" not in text
    assert "'region': 'eu'" in text
