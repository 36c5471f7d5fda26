"""Groups of groups, and arrays that cannot be opened beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import dshuffle
from dshuffle.errors import DatasetError

X = np.arange(12.0).reshape(4, 3)
FIELDS = np.random.default_rng(0).random((4, 5))


def test_the_root_of_a_tree_names_its_groups(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "tree")
    root.create_group("train").create_array("x", data=X)
    root.create_group("more").create_group("test").create_array("x", data=X)
    root.create_group("empty")
    words = r"no arrays of samples of its own, but groups below it have: train, more/test\. .*by its URL"
    with pytest.raises(DatasetError, match=words):
        dshuffle.open_dataset(tmp_path / "tree")
    np.testing.assert_array_equal(dshuffle.open_dataset(tmp_path / "tree" / "train").read_rows([2])["x"], X[[2]])
    assert list(dshuffle.open_dataset(tmp_path / "tree", arrays=["more/test/x"]).arrays) == ["more/test/x"]


def test_many_groups_are_not_all_named(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "tree")
    for number in range(30):
        root.create_group(f"g{number:02}").create_array("x", data=X)
    with pytest.raises(DatasetError, match=r"have: g00, g01, .*, g19, \.\.\.\. Open one"):
        dshuffle.open_dataset(tmp_path / "tree")


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_a_data_tree_with_coordinates_in_its_root(tmp_path: Path, zarr_format: Any, consolidated: bool) -> None:
    xarray = pytest.importorskip("xarray")
    coordinates = {"time": np.arange(4), "lat": np.arange(5.0)}
    fields = xarray.Dataset({"x": (("time", "lat"), FIELDS)})
    tree = xarray.DataTree.from_dict({"/": xarray.Dataset(coords=coordinates), "/train": fields, "/test": fields})
    tree.to_zarr(tmp_path / "tree", zarr_format=zarr_format, consolidated=consolidated)
    with pytest.raises(DatasetError, match=r"only coordinates of its own \(lat\).*have: test, train"):
        dshuffle.open_dataset(tmp_path / "tree")
    np.testing.assert_array_equal(dshuffle.open_dataset(tmp_path / "tree" / "train").read_rows([1])["x"], FIELDS[[1]])
    assert dshuffle.open_dataset(tmp_path / "tree", arrays=["time"]).n_samples == 4


def test_a_collection_of_anndata_stores(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "cells")
    for number in range(2):
        attributes = {"encoding-type": "anndata", "encoding-version": "0.1.0"}
        cells = root.create_group(f"dataset_{number}", attributes=attributes)
        cells.create_array("X", data=X)
        cells.create_group("obs", attributes={"encoding-type": "dataframe"}).create_array("depth", data=np.arange(4))
    with pytest.raises(DatasetError, match=r"have: dataset_0, dataset_1\. Open one"):
        dshuffle.open_dataset(tmp_path / "cells")
    assert list(dshuffle.open_dataset(tmp_path / "cells" / "dataset_0").arrays) == ["X", "obs/depth"]


def make_rectilinear(document: Path, name: str) -> None:
    """Write a rectilinear chunk grid into the metadata of an array, on its own or consolidated."""
    metadata = json.loads(document.read_text())
    consolidated = metadata.get("consolidated_metadata", {}).get("metadata", {})
    for array in (metadata, consolidated.get(name)):
        if array is not None and array["node_type"] == "array":
            array["chunk_grid"] = {
                "name": "rectilinear",
                "configuration": {"kind": "inline", "chunk_shapes": [[1, 3], [3]]},
            }
    document.write_text(json.dumps(metadata))


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_chunks_of_different_sizes_are_skipped(tmp_path: Path, consolidated: bool, enabled: bool) -> None:
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=X, chunks=(2, 3))
    group.create_array("y", data=np.arange(4), chunks=(2,))
    if consolidated:
        zarr.consolidate_metadata(tmp_path / "g")
    make_rectilinear(tmp_path / "g" / "x" / "zarr.json", "x")
    make_rectilinear(tmp_path / "g" / "zarr.json", "x")
    with zarr.config.set({"array.rectilinear_chunks": enabled}):  # releases before 3.3 ignore it
        dataset = dshuffle.open_dataset(tmp_path / "g")
        assert dict(dataset.skipped) == {"x": "its chunks differ in size (chunk grid 'rectilinear')"}
        assert dataset.read_rows([3])["y"].tolist() == [3]
        dataset.check_unchanged()
        with pytest.raises(DatasetError, match=r"\bx\b.*its chunks differ in size \(chunk grid 'rectilinear'\)"):
            dshuffle.open_dataset(tmp_path / "g", arrays=["x"])


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")
def test_consolidated_metadata_that_zarr_does_not_understand(tmp_path: Path, zarr_format: Any) -> None:
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)
    group.create_array("x", data=X.astype("f4"))
    group.create_array("y", data=np.arange(4))
    zarr.consolidate_metadata(tmp_path / "g")
    names = ("zarr.json", "x/zarr.json") if zarr_format == 3 else (".zmetadata", "x/.zarray")
    for name in names:
        document = tmp_path / "g" / name
        text = document.read_text().replace('"float32"', '"float33"').replace('"<f4"', '"<q9"')
        assert text != document.read_text()
        document.write_text(text)
    dataset = dshuffle.open_dataset(tmp_path / "g")
    assert list(dataset.arrays) == ["y"]
    assert dataset.skipped["x"].startswith("zarr cannot open it (")
