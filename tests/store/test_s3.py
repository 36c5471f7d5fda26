"""S3, on a real server: options, credentials, round trips."""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import DatasetError, DatasetExists, DatasetNotFound, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, verify_dataset

pytest.importorskip("obstore", reason="obstore is not installed")

KEY = "AKIAEXAMPLE"
SECRET = "hunter2hunter2"
X = np.arange(600.0).reshape(100, 6)
IDS = np.array([99, 3, 3, 50, 0])


@pytest.fixture(scope="module")
def s3_options() -> Iterator[dict[str, Any]]:
    """Storage options of a real S3 server with an empty bucket."""
    pytest.importorskip("moto", reason="moto is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    # A process of its own: in ours, warnings of its libraries would be errors.
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "moto_server ended"
                time.sleep(0.1)
        else:
            raise TimeoutError("moto_server does not answer")
        yield {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}
    finally:
        server.terminate()
        server.wait(10)


@pytest.mark.parametrize("shard_rows", [pytest.param(None, marks=pytest.mark.slow), 21])
def test_round_trip(s3_options: dict[str, Any], shard_rows: int | None) -> None:
    url = f"s3://bucket/deep/{shard_rows}"
    arrays = {"x": X, "y": np.arange(100)}
    made = create_dataset(url, arrays, chunk_rows=7, shard_rows=shard_rows, storage_options=s3_options)
    with pytest.raises(DatasetExists, match="overwrite=True"):
        create_dataset(url, arrays, storage_options=s3_options)
    for dataset in (made, open_dataset(url, storage_options=s3_options), pickle.loads(pickle.dumps(made))):
        np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    assert verify_dataset(made).bad == ()
    made = create_dataset(url, {"x": X + 1}, chunk_rows=30, overwrite=True, storage_options=s3_options)
    assert list(made.arrays) == ["x"]
    np.testing.assert_array_equal(made.read_rows(IDS)["x"], X[IDS] + 1)
    assert made.traffic.retries == 0


def test_the_usual_environment_variables(s3_options: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint_url"])
    create_dataset("s3://bucket/environment", {"x": X}, overwrite=True)
    np.testing.assert_array_equal(open_dataset("s3://bucket/environment").read_rows(IDS)["x"], X[IDS])


@pytest.mark.parametrize(
    "names", ["access_key_id secret_access_key endpoint", "aws_access_key_id aws_secret_access_key aws_endpoint"]
)
def test_names_of_options(s3_options: dict[str, Any], names: str) -> None:
    options: dict[str, Any] = dict(zip(names.split(), s3_options.values(), strict=True))
    with pytest.raises(DatasetNotFound, match="no dataset exists at s3://bucket/none"):
        open_dataset("s3://bucket/none", storage_options=options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nonsense": SECRET}, r"rejects \['key', 'nonsense', 'secret'\].*'nonsense' is not valid"),
        ({"key": "a" * 5, "access_key_id": "b" * 5}, "Duplicate key aws_access_key_id"),
        ({"endpoint_url": "host:9000"}, "endpoint='host:9000'.*http://HOST"),
        ({"endpoint_url": f"http://me:{SECRET}@host"}, r"endpoint='\*\*\*'.*as separate options"),
        ({"max_retries": -1}, r"max_retries'\]=-1"),
        ({"timeout": 0}, r"timeout'\]=0"),
        ({"timeout": "1s"}, r"timeout'\]='1s'"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match="storage_options") as caught:  # credentials in the URL
        open_dataset(f"s3://{KEY}:{SECRET}@bucket/x")
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidParameter, match=words) as caught:
        open_dataset("s3://bucket/x", storage_options={"key": KEY, "secret": SECRET, **options})
    assert SECRET not in str(caught.value)


def test_a_missing_bucket_is_named(s3_options: dict[str, Any]) -> None:
    for run in (open_dataset, lambda url, **options: create_dataset(url, {"x": X}, **options)):
        with pytest.raises(DatasetError, match=r"s3://absent/x.*bucket does not exist") as caught:
            run("s3://absent/x", storage_options=s3_options)
        assert "tried" not in str(caught.value)


def test_credentials_appear_nowhere(s3_options: dict[str, Any], caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG):
        dataset = create_dataset("s3://bucket/quiet", {"x": X}, overwrite=True, storage_options=s3_options)
        dataset.read_rows(IDS)
    store = next(iter(dataset._sources.values())).array.store
    shown = [repr(dataset), str(dataset), repr(store), str(store), repr(dataset._sources), repr(dataset.traffic)]
    assert SECRET not in "".join([*shown, caplog.text])
