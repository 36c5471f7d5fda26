"""What stands for a dataset when the quality of a way is planned, and by which classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.compare.mixing_of_ways import LEAST_CHUNK_ROWS, QualityOfWays, RowSubset
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, Chunks, GivenSharding, Global, ShuffleSpec
from dshuffle.store import write_sharding


@given(st.data())
def test_rows_that_stand_for_all_are_evenly_apart(data):
    n_samples = data.draw(st.integers(1, 3000))
    chunk_rows = data.draw(st.integers(1, n_samples))
    at_most = data.draw(st.integers(100, 3000))
    subset = RowSubset.of(n_samples, chunk_rows, at_most)
    ids = subset.sample_ids
    assert 0 < len(ids) <= at_most
    assert (np.diff(ids) > 0).all()
    assert ids[0] >= 0
    assert ids[-1] < n_samples
    assert subset.chunk_rows >= min(chunk_rows, LEAST_CHUNK_ROWS)
    # Rows of one chunk there are rows of one chunk here.
    np.testing.assert_array_equal(
        np.unique(ids // chunk_rows, return_inverse=True)[1], np.arange(len(ids)) // subset.chunk_rows
    )
    n_chunks = -(-n_samples // chunk_rows)
    assert len(set((ids // chunk_rows).tolist())) >= min(n_chunks, at_most // max(LEAST_CHUNK_ROWS, subset.chunk_rows))


@given(st.data())
def test_chunks_that_can_be_planned_can_be_planned_for_those_rows(data):
    n_samples = data.draw(st.integers(2, 3000))
    n_workers = data.draw(st.integers(1, min(n_samples, 60)))
    rows = data.draw(st.integers(1, max(1, (n_samples - 1) // max(1, n_workers - 1))))
    subset = RowSubset.of(n_samples, data.draw(st.integers(1, n_samples)), 1000)
    q = len(subset.sample_ids)
    assignment = subset.assignment(Chunks(rows), n_workers)
    ShuffleSpec(q, n_workers, Choices(assignment=assignment, delivery="storage", sharding="random", seed=0))
    assert subset.assignment(Global(), n_workers) == Global()


def test_integers_and_booleans_are_classes(tmp_path):
    q = 600
    arrays = {
        "x": np.random.default_rng(0).random((q, 3)),
        "label": np.repeat([7, -3, 12], q // 3),
        "yes": np.arange(q) % 2 == 0,
        "number": np.arange(q),
    }
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {**arrays, "many": np.arange(q, dtype="u2")}, chunk_rows=50)
    label = QualityOfWays(dataset, "label")
    assert label.classes == "3 values of label"
    stored = label.of(Choices("local", sharding="contiguous"), 3)
    assert stored.class_spread > 10  # every worker has a class of its own
    assert label.of(Choices("global", sharding="random"), 3).class_spread == pytest.approx(1, abs=0.5)
    assert label.of(Choices("chunks", sharding="random"), 3).meets_again == 1
    assert QualityOfWays(dataset, "yes").classes == "2 values of yes"
    assert QualityOfWays(dataset, "x").classes.startswith("64 slices of the stored order")
    with pytest.raises(InvalidParameter, match=r"target='z' .*label, many, number, x, yes"):
        QualityOfWays(dataset, "z")


@pytest.mark.parametrize("at_most", [600, 300])
def test_labels_and_stored_ranks_decide_where_samples_start(tmp_path, monkeypatch, at_most):
    subset = RowSubset.of
    monkeypatch.setattr(RowSubset, "of", lambda n_samples, chunk_rows: subset(n_samples, chunk_rows, at_most))
    arrays = {"label": np.repeat([7, -3, 12], 200), "few": np.arange(600) // 2}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", arrays, chunk_rows=50)
    write_sharding(dataset, "mine", np.repeat([2, 0, 1], 200))
    quality = QualityOfWays(dataset, "label")
    assert quality.of(Choices("local", sharding="stratified:label"), 3).class_spread < 2
    assert quality.of(Choices("local", sharding="stratified:few"), 3).class_spread < 3  # half of them are all distinct
    for sharding in ("mine", GivenSharding.of("not stored", np.repeat([2, 0, 1], 200))):
        assert quality.of(Choices("local", sharding=sharding), 3).meets_again == 1
    for assignment in ("global", "partial:0.5"):
        balanced = quality.of(Choices(assignment, sharding="stratified:label", balance="label"), 3)
        assert 0.2 < balanced.meets_again < 0.6


def test_more_values_than_a_thousand_are_no_classes(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"y": np.arange(1001)})
    assert QualityOfWays(dataset, "y").classes.startswith("64 slices of the stored order")


def test_without_a_target_an_array_of_labels_is_taken(tmp_path):
    label = np.repeat([5, 6, 7, 8], 30)
    arrays = {"a": np.arange(120), "b": np.ones(120), "label": label}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", arrays, chunk_rows=10)
    quality = QualityOfWays(dataset, None)
    assert quality.classes == "4 values of label", "a number of its own for each sample is no label"
    choices = Choices("local", sharding="contiguous")
    assert quality.of(choices, 2) == QualityOfWays(dataset, "label").of(choices, 2)
    part, _ = dataset.split(0.75)
    assert QualityOfWays(part, None).classes == "4 values of label"
    plain = dshuffle.create_dataset(tmp_path / "p.zarr", {"b": np.ones(120)})
    assert QualityOfWays(plain, None).classes.endswith(
        "No array has labels, which are integers or booleans with at most 1,000 values"
    )
    assert ". b has no labels, which are" in QualityOfWays(plain, "b").classes


def test_a_single_row_cannot_be_shuffled(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"y": np.ones(1)})
    assert QualityOfWays(dataset, "y").of(Choices("global"), 1) is None
