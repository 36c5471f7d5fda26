"""The mark of dshuffle's own groups, and attributes of others that have its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zarr

import dshuffle
from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store.identity import Mark


def group_with(path: Path, attribute: Any) -> None:
    group = zarr.create_group(path, attributes={"dshuffle": attribute})
    group.create_array("x", shape=(6,), dtype="i4", chunks=(2,), fill_value=7)[:4] = 1


@pytest.mark.parametrize(
    "attribute",
    [
        {"note": "mine"},
        {},
        True,
        "done",
        ["version", "complete"],
        {"complete": False},
        {"version": 1},
        {"version": "1", "complete": False},
        {"version": True, "complete": False},
        {"version": 1, "complete": 0},
        {"version": 1, "complete": False, "by": "somebody"},
        {"version": 1, "complete": True, "uuid": "mine"},
        {"version": 1, "complete": False, "uuid": "0" * 32},
    ],
)
def test_an_attribute_of_somebody_else_means_nothing(tmp_path: Path, attribute: Any) -> None:
    group_with(tmp_path / "g", attribute)
    dataset = dshuffle.open_dataset(tmp_path / "g")
    assert dataset.read_rows([3, 4])["x"].tolist() == [1, 7]  # an absent chunk is the fill value
    group_with(tmp_path / "plain", None)
    assert dataset.identity == dshuffle.open_dataset(tmp_path / "plain").identity
    dataset.check_unchanged()


def test_the_own_mark_is_recognised(tmp_path: Path) -> None:
    group_with(tmp_path / "g", {"version": 1, "complete": False})
    with pytest.raises(DatasetError, match="was never finished, or is still being written"):
        dshuffle.open_dataset(tmp_path / "g")
    name = "0123456789abcdef" * 2
    zarr.open_group(tmp_path / "g").attrs["dshuffle"] = {"version": 1, "complete": True, "uuid": name}
    dataset = dshuffle.open_dataset(tmp_path / "g")
    assert dataset.identity == name
    with pytest.raises(CorruptChunk):
        dataset.read_rows([5])


def test_a_dataset_is_written_with_the_mark(tmp_path: Path) -> None:
    dataset = dshuffle.create_dataset(tmp_path / "d", {"x": [1]})
    assert zarr.open_group(tmp_path / "d").attrs["dshuffle"] == {
        "version": 1,
        "complete": True,
        "uuid": dataset.identity,
    }


@pytest.mark.parametrize("mark", [Mark.unfinished(), Mark.of_new_dataset(), Mark(complete=True)])
def test_marks_are_read_as_they_are_written(mark: Mark) -> None:
    assert Mark.of(mark.attributes()) == mark
