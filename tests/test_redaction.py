"""Planted secrets: in a URL, and in storage options at any depth. None of them comes out anywhere."""

from __future__ import annotations

import json
import pickle
import re
import traceback

import numpy as np
import pandas as pd
import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.cli import main
from dshuffle.compare.comparison import describe_dataset
from dshuffle.errors import DatasetNotFound, DShuffleError, InvalidParameter
from dshuffle.redaction import hide_secrets, option_values, short_repr

PLANTED = ("planted-user", "planted-password", "planted-signature", "planted-deep")
URL = "memory://planted-user:planted-password@host/d.zarr?sig=planted-signature"


def clean(text):
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
def test_an_error_shows_neither_secrets_of_the_url_nor_of_the_options(url):
    options = {"client_kwargs": {"headers": {"Authorization": "planted-deep"}}} if url.startswith("https") else None
    with pytest.raises(DShuffleError) as caught:
        dshuffle.open_dataset(url, storage_options=options)
    assert clean(caught.value)
    assert clean(repr(caught.value))
    assert clean(repr(pickle.loads(pickle.dumps(caught.value))))
    assert clean("".join(traceback.format_exception(caught.value)))


def test_representations_and_reports_are_clean(dataset):
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
def test_parameters_of_urls(value, name):
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


def test_commands_print_none(dataset, capsys):
    main(["dataset", "info", URL], standalone_mode=False)
    printed = capsys.readouterr()
    assert "***" in printed.out + printed.err
    assert clean(printed.out + printed.err)


def test_errors_that_are_os_errors_too_are_redacted():
    error = DatasetNotFound("no dataset exists at s3://planted-user:planted-password@host/x")
    assert isinstance(error, FileNotFoundError)
    assert str(error) == "no dataset exists at s3://***@host/x"
    assert clean(InvalidParameter.of("url", "ftp://planted-user:planted-password@host", "another"))


def test_what_is_no_secret_stays():
    text = "epoch 3: monkey=4 of s3://bucket/design?version=2, user@host, assignment=global"
    assert hide_secrets(text) == text
    assert option_values({"a": 1, "b": [b"bytes", {"c": "text"}]}) == ("bytes", "text")


def test_large_values_are_shown_by_their_type():
    frame = pd.DataFrame({"a": range(50)})
    for value, shown in (
        (frame, "<pandas.*DataFrame>"),
        (np.arange(9999.0), "<numpy.ndarray>"),
        ([frame], r"\[<pandas.*DataFrame>\]"),
        ("x" * 5000, "'xxx.*x'"),
        (list(range(9999)), r"\[0, 1, .*, \.\.\.\]"),
    ):
        text = str(InvalidParameter.of("value", value, "something else"))
        assert re.fullmatch(rf"value={shown} is not allowed; it must be something else", text)
        assert len(text) < 400
    assert short_repr(np.arange(3)) == "array([0, 1, 2])"
