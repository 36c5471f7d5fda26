import numpy as np
import pytest

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import DatasetExists, InvalidParameter
from dshuffle.planning.assignment.balance import stratified_ranks
from dshuffle.store import open_dataset, read_sharding, stored_shardings, write_sharding

pytestmark = pytest.mark.slow  # real clusters


@pytest.fixture
def labelled(tmp_path):
    """A dataset of 1,000 samples whose labels are sorted, in classes of 7 to 400 samples."""
    label = np.repeat([3, -1, 40, 7, 8], [400, 7, 293, 200, 100])
    arrays = {"x": np.random.default_rng(0).random((1000, 2)), "y": np.arange(1000), "label": label}
    return create_dataset(str(tmp_path / "labelled.zarr"), arrays, chunk_rows=100)


def test_a_session_starts_from_a_stratified_assignment_and_keeps_it(processes, labelled, check_orders):
    with Shuffler(processes, labelled, assignment="local", sharding="stratified:label", seed=5) as shuffler:
        first, second = check_orders(shuffler, 2)
    label = labelled.read_rows(np.arange(1000))["label"]
    expected = stratified_ranks(label, 3, seed=5)
    for rank in range(3):
        np.testing.assert_array_equal(np.sort(first[rank]), np.flatnonzero(expected == rank))
        np.testing.assert_array_equal(np.sort(second[rank]), np.sort(first[rank]))
    assert {record.choices.sharding for record in shuffler.records} == {"stratified:label"}


def test_a_session_starts_from_stored_or_given_ranks(threads, labelled, check_orders):
    ranks = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 200))
    write_sharding(labelled, "mine", ranks)
    assert open_dataset(labelled.url).arrays.keys() == {"x", "y", "label"}
    seen = []
    for sharding in ("mine", ranks):
        with Shuffler(threads, labelled, assignment="partial:0.2", sharding=sharding, delivery="clique") as shuffler:
            seen.append(check_orders(shuffler, 3))
    for stored, given in zip(*seen, strict=True):
        for one, other in zip(stored, given, strict=True):
            np.testing.assert_array_equal(one, other)
    for rank in range(5):
        np.testing.assert_array_equal(np.sort(seen[0][0][rank]), np.flatnonzero(ranks == rank))


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("sorted", r"sharding='sorted' is not allowed.*\['contiguous', 'random', 'round-robin', 'for four'\]"),
        ("stratified:z", r"one of \['label', 'y'\]"),
        ("stratified:x", r"one of \['label', 'y'\]"),
        ("stratified:y", "labels is not allowed: it has 1000 distinct values"),
        ("for four", "n_workers=5 .*4, for which the sharding 'for four' was made"),
        (np.zeros(1000, int), "n_workers=5"),
        (np.arange(5), r"len\(sharding 'given'\)=5 is not allowed; it must be 1000"),
        (np.repeat([0, 1, 2, 3, 4], [100, 300, 200, 200, 200]), "differ by at most one"),
    ],
)
def test_shardings_that_do_not_fit_are_refused(threads, labelled, sharding, message, sessions_left):
    write_sharding(labelled, "for four", np.arange(1000) % 4)
    with pytest.raises(InvalidParameter, match=message):
        Shuffler(threads, labelled, sharding=sharding)
    assert sessions_left(threads) == (0, 0)


def test_a_sharding_does_not_go_with_whole_chunks(threads, labelled):
    with pytest.raises(InvalidParameter, match="whole chunks from the first epoch"):
        Shuffler(threads, labelled, sharding="stratified:label", assignment="chunks")


def test_ranks_that_change_between_client_and_workers_are_noticed(threads, labelled, monkeypatch):
    write_sharding(labelled, "mine", np.arange(1000) % 5)
    monkeypatch.setattr("dshuffle.runtime.dataset_inputs.stored_shardings", lambda dataset: ("mine",))
    real, reads = read_sharding, []

    def changing(dataset, name, key="ranks"):
        values = real(dataset, name, key)
        if key == "ranks":
            reads.append(name)
        return values if key != "ranks" or len(reads) == 1 else values[::-1]

    monkeypatch.setattr("dshuffle.runtime.dataset_inputs.read_sharding", changing)
    with pytest.raises(InvalidParameter, match=r"checksum.*as when the session was opened"):
        Shuffler(threads, labelled, sharding="mine")


def test_what_is_stored_stays_until_it_is_overwritten(labelled):
    assert stored_shardings(labelled) == ()
    write_sharding(labelled, "mine", np.arange(1000) % 5)
    with pytest.raises(DatasetExists, match=r"'mine' .* already exists"):
        write_sharding(labelled, "mine", np.zeros(1000))
    write_sharding(labelled, "mine", np.arange(1000) % 2, overwrite=True)
    assert read_sharding(labelled, "mine").max() == 1


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", "stratified:y", ".hidden", 3])
def test_names_that_cannot_be_stored(labelled, name):
    with pytest.raises(InvalidParameter, match="name="):
        write_sharding(labelled, name, np.zeros(1000))
