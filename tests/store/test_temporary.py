"""Datasets without a path are temporary folders, which last as long as they are used."""

import gc
import os
import pickle

import dask
import numpy as np

import dshuffle
from dshuffle.store import read_array
from dshuffle.store.create import remove_if_mine


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


def test_a_forked_process_does_not_remove_the_dataset(tmp_path):
    remove_if_mine(str(tmp_path), os.getpid() + 1)
    assert tmp_path.exists()
    remove_if_mine(str(tmp_path), os.getpid())
    assert not tmp_path.exists()
