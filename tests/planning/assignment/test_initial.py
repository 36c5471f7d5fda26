import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning import Choices, Chunks, EpochPlanner, GivenSharding, ShuffleSpec, first_ranks
from dshuffle.planning.assignment.balance import stratified_ranks


@st.composite
def labelled(draw):
    q = draw(st.integers(2, 300))
    dtype = draw(st.sampled_from(["i1", "u1", "i8", "u8", ">i4", "?"]))
    classes = draw(st.lists(hnp.from_dtype(np.dtype(dtype)), min_size=1, max_size=12))
    labels = np.array(draw(st.lists(st.sampled_from(classes), min_size=q, max_size=q)), dtype)
    labels[0] = labels[-1]  # not all distinct
    return labels, draw(st.integers(1, q)), draw(st.integers())


@given(labelled())
def test_stratified_class_counts_and_sizes_differ_by_one_at_most(case):
    labels, n, seed = case
    ranks = stratified_ranks(labels, n, seed=seed)
    assert ranks.dtype == np.int32
    assert np.ptp(np.bincount(ranks, minlength=n)) <= 1
    for label in np.unique(labels):
        assert np.ptp(np.bincount(ranks[labels == label], minlength=n)) <= 1
    np.testing.assert_array_equal(ranks, stratified_ranks(labels, n, seed=seed))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[1, 2]], r"labels.shape=\(1, 2\)"),
        ([1, 1], r"len\(labels\)=2 is not allowed; it must be 3"),
        ([0.5, 1.0, 1.0], "labels.dtype='float64'.*return_inverse"),
        (["a", "b", "a"], "labels.dtype='<U1'.*return_inverse"),
        ([1, 3, 2], "labels is not allowed: it has 3 distinct values for 3 .*'random'"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, message):
    with pytest.raises(InvalidParameter, match=message):
        stratified_ranks(labels, 2, seed=0, n_samples=3)


@given(st.integers(1, 50), st.integers(0, 50))
def test_round_robin_deals_in_turn(n, more):
    ranks = first_ranks("round-robin", n + more, n, seed=0)
    assert ranks.tolist() == [sample % n for sample in range(n + more)]


def spec(sharding, **changes):
    n_samples, n_workers = changes.pop("n_samples", 5), changes.pop("n_workers", 2)
    return ShuffleSpec(n_samples, n_workers, Choices(**{"sharding": sharding, **changes}))


def test_a_planner_starts_from_a_given_sharding():
    given_ranks = GivenSharding.of("mine", [1, 0, 1, 0, 1])
    planner = EpochPlanner(spec(given_ranks))
    assert planner.load().ranks.tolist() == [1, 0, 1, 0, 1]
    planner.advance()
    assert str(given_ranks) == "mine"
    with pytest.raises(PlanError, match=r"'mine' are not known here"):
        EpochPlanner(spec(GivenSharding("mine", 2, given_ranks.checksum))).load()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 0, 2, 2], "sharding is not allowed: worker 1 has 0 samples and worker 0 has 2"),
        ([0, 0, 0, 1], "worker 0 has 3.*differ by at most one"),
        ([0, -1], r"sharding\[1\]=-1"),
        ([0.0, 1.0], "sharding.dtype='float64'"),
        (np.empty(0, int), r"not broadcast=0"),
        ([5], r"not broadcast=1.*>= 6"),
    ],
)
def test_ranks_that_are_no_balanced_assignment_are_refused(ranks, message):
    with pytest.raises(InvalidParameter, match=message):
        GivenSharding.of("mine", ranks)


def test_a_given_sharding_of_another_shape_is_refused():
    mine = GivenSharding.of("mine", [1, 0, 1, 0, 1])
    with pytest.raises(InvalidParameter, match=r"n_workers=3 .*2, for which the sharding 'mine' was made"):
        spec(mine, n_workers=3)
    with pytest.raises(InvalidParameter, match=r"'mine'.*=5 is not allowed; it must be 6"):
        spec(mine, n_samples=6)
    with pytest.raises(InvalidParameter, match="whole chunks from the first epoch"):
        spec(mine, assignment=Chunks(1))
    with pytest.raises(InvalidParameter, match="as when the session was opened"):
        mine.found([0, 1, 0, 1, 0])
