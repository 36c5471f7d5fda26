"""Sessions that keep the classes of labels in equal parts on all workers."""

import warnings

import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.store import write_sharding

pytestmark = pytest.mark.slow  # real clusters

LABELS = np.repeat([3, -1, 40, 7, 8, 100], [400, 7, 290, 200, 100, 3])


@pytest.fixture
def labelled(tmp_path):
    """A dataset of 1,000 samples whose labels are sorted, in classes of 3 to 400 samples."""
    arrays = {"x": np.random.default_rng(0).random((1000, 2)), "y": np.arange(1000), "label": LABELS}
    return create_dataset(str(tmp_path / "labelled.zarr"), arrays, chunk_rows=100)


def spreads(ranks_of_samples, n_workers):
    """How far the counts of each class differ between workers."""
    return [np.ptp(np.bincount(ranks_of_samples[label == LABELS], minlength=n_workers)) for label in np.unique(LABELS)]


@pytest.mark.parametrize("delivery", ["peer", "storage", "clique"])
@pytest.mark.parametrize("assignment", ["local", "global"])
def test_every_epoch_is_exactly_once_and_balanced(threads, labelled, check_orders, assignment, delivery):
    job = {"assignment": assignment, "delivery": delivery, "cache_fraction": 0.4, "balance": "label"}
    with pytest.warns(ShardingWarning, match=r"balance='label': 1 of 6 classes .* workers \(5\).* smallest has 3"):
        shuffler = Shuffler(threads, labelled, **job)
    with shuffler:
        assert shuffler.choices.label in repr(shuffler)
        epochs = check_orders(shuffler, 4)
    last = None
    for parts in epochs:
        assert {len(part) for part in parts} == {200}
        ranks = np.empty(1000, int)
        for rank, part in enumerate(parts):
            ranks[part] = rank
        assert max(spreads(ranks, 5)) <= 1
        if last is not None and assignment == "local":
            assert ranks.tolist() == last.tolist()
        last = ranks
    assert {str(record.choices.balance) for record in shuffler.records} == {"label"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"balance": "z"}, r"balance='z' is not allowed; it must be None, or one of \['label', 'y'\].*one integer"),
        ({"balance": "x"}, r"balance='x' is not allowed; it must be None, or one of \['label', 'y'\]"),
        ({"balance": 3}, r"balance=3 is not allowed"),
        ({"balance": "y"}, "balance 'y' is not allowed: it has 1000 distinct values"),
        ({"balance": "label", "assignment": "aligned"}, "balance='label' is not allowed.*'aligned'"),
        ({"balance": "label", "assignment": "partial:0.3"}, "balance='label' is not allowed.*'global' or 'local'"),
        (
            {"balance": "label", "assignment": "chunks"},
            "balance='label' is not allowed.*None with the assignment 'chunks'",
        ),
        ({"balance": "label", "sharding": "contiguous"}, "sharding='contiguous'.*'random' or 'stratified:label'"),
        ({"balance": "label", "sharding": "mine"}, "sharding='mine'.*'random' or 'stratified:label'"),
        ({"balance": "label", "sharding": np.arange(1000) // 200}, "sharding='given'.*'random' or 'stratified:label'"),
    ],
)
def test_what_cannot_be_balanced_is_refused(threads, labelled, sessions_left, wrong, message):
    write_sharding(labelled, "mine", np.arange(1000) // 200)
    with pytest.raises(InvalidParameter, match=message):
        Shuffler(threads, labelled, **wrong)
    assert sessions_left(threads) == (0, 0)


def test_a_warning_that_is_an_error_leaves_no_session(threads, labelled, sessions_left):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        with pytest.raises(ShardingWarning, match="1 of 6 classes"):
            Shuffler(threads, labelled, balance="label")
    assert sessions_left(threads) == (0, 0)


def test_labels_that_change_between_client_and_workers_are_noticed(threads, labelled, monkeypatch):
    reads = []

    def changing(dataset, name):
        reads.append(name)
        return LABELS if len(reads) == 1 else LABELS[::-1]

    monkeypatch.setattr("dshuffle.runtime.dataset_inputs.read_labels", changing)
    with pytest.raises(InvalidParameter, match=r"checksum.*as when the session was opened"):
        Shuffler(threads, labelled, balance="label")
