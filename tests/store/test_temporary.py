"""Datasets without a path are temporary folders, which last as long as they are used."""

import gc
import os
import pickle

import dask
import numpy as np

import dshuffle
from dshuffle.store import read_array

from ..conftest import in_a_fork


def contents(dataset):
    return dataset.read_rows(np.arange(dataset.n_samples))


def test_a_dataset_without_a_path_lasts_as_long_as_it_is_used(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        dataset = dshuffle.create_dataset(None, {"x": np.arange(9)}, chunk_rows=2)
    assert dataset.arrays["x"].chunk_rows == 2
    assert dataset.url.startswith(str(tmp_path))
    copy, part = pickle.loads(pickle.dumps(dataset)), dataset.select([3, 4])
    del dataset
    gc.collect()
    assert contents(part)["x"].tolist() == [3, 4]
    assert len(contents(copy)["x"]) == 9
    del part
    gc.collect()
    assert not os.listdir(tmp_path)


def test_who_reads_a_dataset_without_a_path_keeps_it(tmp_path):
    arrays = {"x": np.arange(900).reshape(300, 3)}
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        assert read_array(dshuffle.create_dataset(None, arrays), "x")[4:5].tolist() == [[12, 13, 14]]


def test_a_forked_process_does_not_remove_the_dataset():
    held = [dshuffle.create_dataset(None, {"x": np.arange(9)})]
    url = held[0].url
    in_a_fork(held.clear)
    assert os.path.exists(url)
    held.clear()
    gc.collect()
    assert not os.path.exists(url)
