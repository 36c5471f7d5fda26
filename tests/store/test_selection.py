"""Parts of datasets: selected and split, read, pickled, shuffled."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.store import open_dataset, read_array, stored_shardings, write_sharding
from dshuffle.store.view import split_samples, split_strata

from ..conftest import at_most

N = 200
ARRAYS = {"x": np.arange(N * 3.0).reshape(N, 3), "group": np.arange(N) // 7 % 11}


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset("memory://test-selection", ARRAYS, chunk_rows=16, overwrite=True)


@given(mask=st.lists(st.booleans(), min_size=N, max_size=N), again=st.data())
@at_most(50)
def test_a_part_reads_as_the_array_does(mask, again):
    whole = open_dataset("memory://test-selection")
    if not any(mask):
        with pytest.raises(InvalidParameter, match="it selects nothing"):
            whole.select(mask)
        return
    part, expected = whole.select(mask), ARRAYS["x"][mask]
    inner = again.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, unique=True))
    for one, values in ((part, expected), (part.select(inner), expected[np.sort(inner)])):
        assert one.n_samples == len(values)
        ids = np.arange(len(values))[::-1]
        np.testing.assert_array_equal(one.read_rows(ids)["x"], values[ids])
        np.testing.assert_array_equal(read_array(one, "x")[0 : len(values)], values)
        rows = one.layout.empty(len(values))
        one.read_into(rows, ids, ids)
        np.testing.assert_array_equal(one.layout.column(rows, "x"), values)


def test_a_part_is_pickled_by_a_bit_a_sample(dataset):
    part = dataset.select(np.arange(0, N, 3))
    again = pickle.loads(pickle.dumps(part))
    assert again.identity == part.identity != dataset.identity
    assert dataset.select(np.arange(1, N, 3)).identity != part.identity
    np.testing.assert_array_equal(again.read_rows([1])["x"], ARRAYS["x"][[3]])
    assert len(pickle.dumps(part)) - len(pickle.dumps(dataset)) < N / 8 + 300
    assert "67 of 200 samples" in repr(part)
    part.check_unchanged()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(5, bool), r"samples.shape=\(5,\) is not allowed; it must be \(200,\) for a mask"),
        ([1, 1], "some ids are repeated"),
        ([200], r"samples\[0\]=200 is not allowed"),
        ([], "it selects nothing"),
        ([0.5], "samples.dtype='float64'"),
    ],
)
def test_what_cannot_be_selected(dataset, samples, message):
    with pytest.raises(InvalidParameter, match=message):
        dataset.select(samples)


@pytest.mark.parametrize("by", ["sample", "chunk", "group"])
def test_parts_of_a_split_are_complete_disjoint_and_reproducible(dataset, by):
    first, second = dataset.split(0.7, by=by, seed=3)
    rows = [part.read_rows(np.arange(part.n_samples)) for part in (first, second)]
    ids = [(one["x"][:, 0] / 3).astype(int) for one in rows]
    assert sorted(np.concatenate(ids)) == list(range(N))
    assert abs(first.n_samples - 0.7 * N) <= {"sample": 0, "chunk": 16, "group": 21}[by]
    kept = {"sample": ids, "chunk": [one // 16 for one in ids], "group": [one["group"] for one in rows]}[by]
    assert not set(kept[0]) & set(kept[1])
    assert dataset.split(0.7, by=by, seed=3)[0].identity == first.identity
    assert dataset.split(0.7, by=by, seed=4)[0].identity != first.identity
    inner, _ = second.split(0.5, by=by)  # parts of parts
    assert set((inner.read_rows(np.arange(inner.n_samples))["x"][:, 0] / 3).astype(int)) < set(ids[1])


@pytest.mark.parametrize("fraction", [0.5, 0.7, 0.95])
def test_both_parts_of_a_stratified_split_have_every_label(dataset, fraction):
    first, second = dataset.split(fraction, stratify="group", seed=3)
    rows = [part.read_rows(np.arange(part.n_samples)) for part in (first, second)]
    assert sorted(np.concatenate([part["x"][:, 0] / 3 for part in rows])) == list(range(N))
    counts = [np.bincount(part["group"], minlength=11) for part in rows]
    assert abs(counts[0] - fraction * sum(counts)).max() < 1
    assert abs(first.n_samples - fraction * N) < 1
    assert dataset.split(fraction, stratify="group", seed=4)[0].identity != first.identity


@pytest.mark.parametrize(
    "split", [functools.partial(split_samples, 10, 0.3, None), functools.partial(split_strata, np.arange(10) % 3, 0.3)]
)
def test_every_sample_is_as_likely_in_the_first_part(split):
    counts = sum(np.bincount(split(seed)[0], minlength=10) for seed in range(3000))
    assert counts.sum() == 9000
    assert abs(counts - 900).max() < 120  # five standard deviations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "fraction=0.0 is not allowed; it must be a fraction that leaves samples in both parts"),
        ({"fraction": 1.0}, "leaves samples in both parts"),
        ({"fraction": 2}, "fraction=2 is not allowed"),
        (
            {"fraction": 0.5, "by": "x"},
            "by='x' is not allowed; it must be 'sample', 'chunk', 'time', or one of the arrays group",
        ),
        ({"fraction": 0.5, "by": "nothing"}, "by='nothing' is not allowed"),
        ({"fraction": 0.5, "seed": -1}, "seed=-1 is not allowed"),
        ({"fraction": 0.5, "stratify": "x"}, "stratify='x' is not allowed; it must be one of the arrays group"),
        ({"fraction": 0.5, "stratify": "group", "by": "chunk"}, "stratify='group' .* must be None with by='chunk'"),
        ({"fraction": 0.0, "stratify": "group"}, "leaves samples in both parts"),
        ({"fraction": 1.0, "by": "time"}, "leaves samples in both parts"),
    ],
)
def test_what_cannot_be_split(dataset, options, message):
    with pytest.raises(InvalidParameter, match=message):
        dataset.split(**options)


@pytest.mark.parametrize("assignment", ["global", "chunks", "partial:0.3"])
@pytest.mark.parametrize("delivery", ["peer", "storage"])
def test_a_part_is_shuffled_like_any_dataset(client, dataset, assignment, delivery):
    part = dataset.select(ARRAYS["group"] != 4)
    expected = np.sort(ARRAYS["x"][ARRAYS["group"] != 4][:, 0])
    with dshuffle.Shuffler(client, part, assignment=assignment, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(3):
            found = client.gather(epoch.map(lambda partition: partition["x"][:, 0]))
            np.testing.assert_array_equal(np.sort(np.concatenate(found)), expected)


def test_labels_of_a_part_balance_its_workers(client, dataset):
    part, _ = dataset.split(0.5)
    with dshuffle.Shuffler(client, part, balance="group") as shuffler:
        for epoch in shuffler.epochs(2):
            counts = [np.bincount(one, minlength=11) for one in client.gather(epoch.map(lambda p: p["group"]))]
            assert abs(counts[0] - counts[1]).max() <= 1


def test_shardings_are_stored_with_whole_datasets(dataset):
    write_sharding(dataset, "mine", np.arange(N) % 2, overwrite=True)
    part = dataset.select(np.arange(10))
    assert stored_shardings(part) == ()
    assert stored_shardings(dataset) == ("mine",)
    with pytest.raises(InvalidParameter, match="not those of the stored dataset"):
        write_sharding(part, "other", np.arange(10) % 2)


def test_classes_of_which_nothing_is_learned_are_counted(dataset, caplog):
    _, second = dataset.split(0.7, by="group", seed=3)
    held_out = len(np.unique(second.read_rows(np.arange(second.n_samples))["group"]))
    assert f"{held_out} of 11 values of group are in the second part alone" in caplog.text
    assert "stratify='group'" in caplog.text
    caplog.clear()
    many = {"x": np.arange(100.0), "patient": np.arange(100) // 4}
    dshuffle.create_dataset("memory://test-patients", many, overwrite=True).split(0.7, by="patient")
    dataset.split(0.7, stratify="group")
    assert not caplog.text
