"""URLs and paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import dshuffle
from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import read_array, read_sharding, stored_shardings, write_sharding


@pytest.fixture
def place(tmp_path: Path) -> str:
    return dshuffle.create_dataset(tmp_path / "x.zarr", {"x": np.arange(4)}).url


def test_a_file_url_is_a_path_and_a_tilde_the_home_folder(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for prefix in ("file://", "file://localhost", "FILE://", ""):
        assert dshuffle.open_dataset(prefix + place).url == place
    monkeypatch.setenv("HOME", os.path.dirname(place))
    monkeypatch.chdir(tmp_path)
    assert dshuffle.open_dataset("~/x.zarr").url == place
    assert dshuffle.create_dataset("~/y.zarr", {"x": [1]}).url == os.path.join(os.path.dirname(place), "y.zarr")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://server/data/x.zarr", "file://localhost/PATH"),
        ("file://", "must be file:///PATH"),
        ("s3://bucket/x.zarr\n", "without spaces and line ends"),
        (" x.zarr", "without spaces and line ends"),
        ("C:\\data\\x.zarr", "not a path of Windows"),
        ("\\\\server\\share\\x.zarr", "not a path of Windows"),
        (Path("s3://bucket/x.zarr"), r"two slashes after the colon .pathlib.Path removes one"),
        ("nfs://server/export/x.zarr", "where all hosts mount the export"),
        ("https:/host/x.zarr", "two slashes after the colon"),
        (b"x.zarr", "must be a path or a URL"),
    ],
)
def test_what_is_no_url(url: object, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        dshuffle.open_dataset(url)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=words):
        dshuffle.create_dataset(url, {"x": [1]})  # type: ignore[arg-type]


def test_a_file_system_that_cannot_be_reached_is_a_dataset_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"cannot open zip://x.zarr::.*No such file"):
        dshuffle.open_dataset(f"zip://x.zarr::{tmp_path}/absent.zip")


def test_a_url_is_accepted_where_a_dataset_is(place: str) -> None:
    assert dshuffle.verify_dataset(place).ok
    assert dshuffle.verify_dataset(Path(place)).n_chunks == 1
    assert read_array(place, "x")[1:3].tolist() == [1, 2]
    write_sharding(place, "mine", [0, 1, 1, 0])
    assert stored_shardings(place) == ("mine",)
    assert read_sharding(place, "mine").tolist() == [0, 1, 1, 0]
    with pytest.raises(DatasetError, match=r"x.zarr has no sharding 'yours'; it has mine"):
        read_sharding(place, "yours")
    with pytest.raises(DatasetNotFound, match="no dataset exists at"):
        dshuffle.verify_dataset(place + "/absent")
