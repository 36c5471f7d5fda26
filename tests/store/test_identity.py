"""Which dataset this is: the same in copies, another one once it was written again."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import zarr

from dshuffle.errors import DatasetChanged, DatasetError
from dshuffle.runtime.session_spec import DatasetReference
from dshuffle.store import create_dataset, open_dataset, read_sources, write_sharding
from dshuffle.store.identity import _in_words
from dshuffle.store.sample_arrays import ArrayChoice

X = np.random.default_rng(0).random((200, 3))


def create(url, x=X):
    return create_dataset(url, {"x": x}, chunk_rows=10, overwrite=True)


def foreign(url, x=X, **options):
    zarr.create_group(url, overwrite=True, **options).create_array("x", data=x, chunks=(10, 3))
    return open_dataset(url)


@pytest.mark.parametrize("make", [create, foreign, lambda url: foreign(url, zarr_format=2)])
def test_copies_are_the_same_dataset(tmp_path, make):
    dataset = make(str(tmp_path / "a.zarr"))
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert open_dataset(tmp_path / "b.zarr").identity == dataset.identity
    assert pickle.loads(pickle.dumps(dataset)).identity == dataset.identity
    dataset.check_unchanged()


def test_what_was_chosen_is_in_an_identity_as_in_earlier_releases():
    """Checkpoints have identities. The name of a class in them was Wanted."""
    assert _in_words(ArrayChoice()) == ""
    chosen = ArrayChoice(arrays=["x"], sample_dim=0, decode=False)
    assert _in_words(chosen) == "Wanted(arrays=('x',), sample_dim=0, decode=False)"


def test_the_same_rows_written_again_are_another_dataset(tmp_path):
    dataset = create(str(tmp_path / "a.zarr"))
    assert create(str(tmp_path / "a.zarr")).identity != dataset.identity
    with pytest.raises(DatasetChanged, match=r"a.zarr was written again while it was in use"):
        dataset.check_unchanged()


def test_a_stored_sharding_leaves_a_dataset_as_it_is(tmp_path):
    for dataset in (create(str(tmp_path / "a.zarr")), foreign(str(tmp_path / "b.zarr"))):
        write_sharding(dataset, "mine", np.arange(200) % 2)
        dataset.check_unchanged()
        assert open_dataset(dataset.url).identity == dataset.identity


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: x.astype("f4"), lambda x: np.concatenate([x, x]), lambda x: x[:, ::-1]]
)
def test_a_group_from_elsewhere_is_known_by_its_metadata_and_some_chunks(tmp_path, change):
    dataset = foreign(str(tmp_path / "a.zarr"))
    before = dataset.traffic
    assert foreign(str(tmp_path / "b.zarr")).identity == dataset.identity
    assert foreign(str(tmp_path / "c.zarr"), change(X)).identity != dataset.identity
    foreign(str(tmp_path / "a.zarr"), change(X))
    with pytest.raises(DatasetChanged):
        dataset.check_unchanged()
    assert dataset.traffic == before, "looking at a dataset is not reading it"


def test_what_is_gone_or_unfinished_is_said(tmp_path):
    dataset = create(str(tmp_path / "a.zarr"))
    zarr.open_group(tmp_path / "a.zarr").attrs["dshuffle"] = {"version": 1, "complete": False}
    with pytest.raises(DatasetChanged, match="now incomplete"):
        dataset.check_unchanged()
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(DatasetError, match="cannot be read any more"):
        dataset.check_unchanged()


def test_a_worker_refuses_another_dataset_than_the_client_has(tmp_path):
    dataset = create(str(tmp_path / "a.zarr"))
    reference = DatasetReference.of(dataset)
    assert reference.open().identity == dataset.identity
    create(str(tmp_path / "a.zarr"), X + 1)  # as where a node has an old copy at the same path
    with pytest.raises(DatasetChanged, match=rf"not the one on the client: .*{dataset.identity}"):
        reference.open()


def test_datasets_of_older_releases_have_a_digest(tmp_path):
    dataset = create(str(tmp_path / "a.zarr"))
    zarr.open_group(tmp_path / "a.zarr").attrs["dshuffle"] = {"version": 1, "complete": True}
    older = open_dataset(tmp_path / "a.zarr")
    assert older.identity not in (dataset.identity, "incomplete")
    older.check_unchanged()
    again = create_dataset(tmp_path / "b.zarr", read_sources([str(tmp_path / "a.zarr")]))
    assert len({dataset.identity, older.identity, again.identity}) == 3


@pytest.mark.parametrize("make", [create, foreign, lambda url, x: foreign(url, x, zarr_format=2)])
@pytest.mark.parametrize(
    "attributes",
    [
        {"scale_factor": 0.5},
        {"add_offset": 1},
        {"_FillValue": 3},
        {"missing_value": [3, 4]},
        {"_Unsigned": "true"},
        {"units": "days since 2000-01-01"},
        {"units": "days since 2000-01-01", "calendar": "noleap"},
    ],
)
def test_attributes_that_decide_the_values_are_part_of_the_identity(tmp_path, make, attributes):
    url = str(tmp_path / "a.zarr")
    dataset = make(url, np.arange(600).reshape(200, 3))
    array = zarr.open_group(url)["x"]
    array.attrs["long_name"] = "a name"
    assert open_dataset(url).identity == dataset.identity
    stored = open_dataset(url, decode=False)
    identities = {dataset.identity}
    for name, value in attributes.items():
        array.attrs[name] = value
        identities.add(open_dataset(url).identity)
    assert len(identities) == 1 + len(attributes)
    with pytest.raises(DatasetChanged):
        dataset.check_unchanged()
    stored.check_unchanged()  # what is stored has not changed


def test_the_axis_of_the_samples_is_part_of_the_identity(tmp_path):
    url = str(tmp_path / "a.zarr")
    zarr.create_group(url, zarr_format=2).create_array(
        "x", data=np.ones((5, 5)), attributes={"_ARRAY_DIMENSIONS": ["t", "k"]}
    )
    before = open_dataset(url, sample_dim="t")
    zarr.open_group(url)["x"].attrs["_ARRAY_DIMENSIONS"] = ["k", "t"]
    assert open_dataset(url, sample_dim="t").identity != before.identity
