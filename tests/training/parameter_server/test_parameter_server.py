"""The parameter server in one process: what the actors do with the same slices, batches and turns."""

from __future__ import annotations

import asyncio
import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import (
    Decay,
    EarlyStopping,
    LinearModel,
    SoftmaxRegression,
    Staleness,
    geometric_speeds,
    simulate_parameter_server,
)
from dshuffle.training.parameter_server.slices import OrderedSlice, ParameterSlice, Turns, check_labels
from dshuffle.training.parameter_server.trainer import Asynchrony, MiniBatches, survey, total_loss

BLOBS = {name: array.compute() for name, array in gaussian_blobs(121, n_features=3, n_classes=4).items()}
LINE = {"x": BLOBS["x"].astype(float), "y": BLOBS["x"] @ np.array([1.0, -2.0, 0.5])}


def simulate(n_workers, arrays=LINE, model=None, **options):
    ranks = first_ranks("random", len(arrays["y"]), n_workers, seed=1)
    defaults = {"epochs": 2, "batch_size": 5 * n_workers, "step": 0.1, "seed": 3}
    return ranks, simulate_parameter_server(arrays, ranks, model or LinearModel(), **{**defaults, **options})


@pytest.mark.parametrize(
    ("model", "data"), [(SoftmaxRegression(4), BLOBS), (LinearModel(), LINE), (LinearModel(intercept=False), LINE)]
)
def test_gradients_are_those_of_the_loss(model, data):
    rng = np.random.default_rng(0)
    parameters = rng.standard_normal(len(model.first(3, seed=0)))
    gradient, loss = model.gradient(parameters, data["x"], data["y"])
    assert loss == pytest.approx(model.loss(parameters, data["x"], data["y"]))
    nudges = 1e-5 * np.eye(len(parameters))
    differences = [
        model.loss(parameters + nudge, data["x"], data["y"]) - model.loss(parameters - nudge, data["x"], data["y"])
        for nudge in nudges
    ]
    np.testing.assert_allclose(gradient, np.array(differences) / 2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pace", ["once", "free"])
def test_one_worker_is_plain_sgd(pace):
    _, history = simulate(1, batch_size=10, pace=pace, schedule=Decay(0.5))
    weights, offset = np.zeros(3), 0.0
    for epoch in range(2):
        sharing = Asynchrony(1, 10, 0.1, "once", seed=3)
        batches = MiniBatches(np.arange(121), sharing, rank=0, epoch=epoch)
        while batches.following:
            batch = batches.take()
            wrong = LINE["x"][batch] @ weights + offset - LINE["y"][batch]
            offset -= 0.1 * 0.5**epoch * wrong.mean()
            weights -= 0.1 * 0.5**epoch * (wrong[:, np.newaxis] * LINE["x"][batch]).mean(axis=0)
    np.testing.assert_allclose(history.model, [*weights, offset], rtol=1e-12)
    assert history.staleness.histogram == (26,)


def test_it_is_what_a_list_of_events_gives():
    """Equations 3 to 5, with all finishing times laid out beforehand and every version of the parameters kept."""
    speeds = (1.0, 0.55, 0.3)
    ranks, history = simulate(3, speeds=speeds, epochs=2)
    versions, staleness = [np.zeros(4)], []
    for epoch in range(2):
        events = []
        for rank, speed in enumerate(speeds):
            shard = np.flatnonzero(ranks == rank)
            batches = MiniBatches(shard, Asynchrony(3, 15, 0.1, seed=3), rank=rank, epoch=epoch)
            begin = 0.0
            while batches.following:
                batch = shard[batches.take()]
                events.append((begin + len(batch) / speed, begin, rank, batch))
                begin = events[-1][0]
        events.sort(key=lambda event: event[0])
        ends = [event[0] for event in events]
        before = len(versions) - 1
        for number, (_, begin, _, batch) in enumerate(events):
            seen = before + sum(end <= begin for end in ends)
            rows = np.column_stack([LINE["x"][batch], np.ones(len(batch))])
            gradient = rows.T @ (rows @ versions[seen] - LINE["y"][batch]) / len(batch)
            staleness.append(before + number - seen)
            versions.append(versions[-1] - 0.1 / 3 * gradient)
    np.testing.assert_allclose(history.model, versions[-1], rtol=1e-10)
    assert history.staleness.histogram == tuple(np.bincount(staleness))
    assert history.staleness.mean == pytest.approx(np.mean(staleness))


def test_equally_fast_workers_are_as_stale_as_there_are_others():
    _, history = simulate(4, batch_size=40, arrays={name: array[:120] for name, array in LINE.items()})
    # Three batches each: in every epoch the first ones, from what all began with, are 0, 1, 2 and 3 updates old.
    assert history.staleness.counts.tolist() == [[2, 0, 0, 4], [0, 2, 0, 4], [0, 0, 2, 4], [0, 0, 0, 6]]
    assert (history.staleness.pushes, history.staleness.most) == (24, 3)


def test_at_the_free_pace_fast_workers_do_more():
    ranks, history = simulate(4, pace="free", speeds=geometric_speeds(4, 8), epochs=10)
    assert history.staleness.pushes == 10 * math.ceil(121 / 5)
    by_rank = history.staleness.pushes_by_rank
    assert by_rank[0] > 1.7 * by_rank[1] > 1.7**2 * by_rank[2]
    stale = history.staleness.mean_by_rank
    assert list(stale) == sorted(stale)
    _, once = simulate(4, speeds=geometric_speeds(4, 8), epochs=10)
    shares = np.bincount(ranks)
    assert once.staleness.pushes_by_rank == tuple(10 * -(-shares // 5))


@pytest.mark.slow
@given(data=st.data())
def test_staleness_is_bounded_and_no_batch_is_lost(data):
    n_workers = data.draw(st.integers(1, 5))
    speeds = tuple(data.draw(st.lists(st.floats(0.1, 10), min_size=n_workers, max_size=n_workers)))
    pace = data.draw(st.sampled_from(["once", "free"]))
    ranks, history = simulate(n_workers, speeds=speeds, pace=pace, epochs=2, step=1e-3)
    shares = np.bincount(ranks)
    batches = math.ceil(121 / 5) if pace == "free" else int(sum(-(-shares // 5)))
    assert history.staleness.pushes == 2 * batches
    for rank, counts in enumerate(history.staleness.counts):
        # While one batch is worked on every other worker ends at most so many, the short ones at the end of a pass
        # counted as well.
        whole = [5 / speed for speed in speeds]
        allowed = sum(2 * (math.ceil(whole[rank] / whole[other]) + 1) for other in range(n_workers) if other != rank)
        assert np.flatnonzero(counts).max(initial=0) <= allowed


@given(
    n_samples=st.integers(3, 60),
    size=st.integers(1, 3),
    pace=st.sampled_from(["once", "free"]),
    epoch=st.integers(0, 3),
    done=st.integers(0, 50),
    seed=st.integers(0, 2**40),
)
def test_a_pass_goes_over_every_sample_once(n_samples, size, pace, epoch, done, seed):
    ids = np.random.default_rng(seed).permutation(1000)[:n_samples]
    sharing = Asynchrony(2, 2 * size, 1.0, pace, seed=seed)
    batches = MiniBatches(ids, sharing, rank=1, epoch=epoch, done=done)
    per_pass = -(-n_samples // size)
    if pace == "free":
        for _ in range(-done % per_pass):  # to the end of the pass that was under way
            batches.take()
    taken = [(batches.following, batches.take()) for _ in range(per_pass)]
    assert all(expected == len(batch) for expected, batch in taken)
    assert np.array_equal(np.sort(np.concatenate([batch for _, batch in taken])), np.arange(n_samples))
    assert batches.following == (0 if pace == "once" else min(size, n_samples))
    # Of the same samples in another order the same batches are made.
    other = np.sort(ids)
    again = MiniBatches(other, sharing, rank=1, epoch=epoch, done=done)
    whole = MiniBatches(ids, sharing, rank=1, epoch=epoch, done=done)
    assert np.array_equal(other[again.take()], ids[whole.take()])


def test_schedule_validation_and_early_stopping():
    seen = []
    _, history = simulate(
        3,
        BLOBS,
        SoftmaxRegression(4),
        epochs=9,
        validate=lambda parameters: {"size": np.abs(parameters).sum()},
        early_stopping=EarlyStopping(1, least_change=0.02),
        on_epoch=seen.append,
    )
    assert history.stopped_early
    assert 2 <= len(history.points) < 9
    assert list(history.points) == seen
    assert history.points[-1].validation == {"size": pytest.approx(np.abs(history.model).sum())}


async def _ordered(speeds, arrivals, n_updates=None):
    """Push ones, in any order of arrival; the order in which they were applied, by version."""
    server = OrderedSlice(np.zeros(1), speeds)
    await server.begin(1.0, n_updates)
    batches = {rank: 0 for rank in range(len(speeds))}
    versions = {rank: (await server.pull(rank, 1)).version for rank in batches}
    order = []

    async def worker(rank, delays):
        for delay in delays:
            for _ in range(delay):
                await asyncio.sleep(0)
            batches[rank] += 1
            following = int(batches[rank] < len(delays))
            reply = await server.push(rank, versions[rank], np.ones(1), following)
            versions[rank] = reply.version
            order.append((reply.version, rank))

    await asyncio.gather(*(worker(rank, delays) for rank, delays in enumerate(arrivals)))
    return [rank for _, rank in sorted(order)]


@pytest.mark.slow
@given(data=st.data())
def test_an_ordered_slice_takes_turns_whoever_comes_first(data):
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
    arrivals = [data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)) for _ in speeds]
    expected = sorted((sum([1 / speed] * (k + 1)), rank) for rank, speed in enumerate(speeds) for k in range(3))
    assert asyncio.run(_ordered(speeds, arrivals)) == [rank for _, rank in expected]


def test_an_aborted_slice_lets_nobody_wait():
    async def waits_for_a_turn():
        server = OrderedSlice(np.zeros(1), [1.0, 9.0])
        await server.begin(1.0, None)
        for rank in range(2):
            await server.pull(rank, 1)
        push = asyncio.ensure_future(server.push(0, 0, np.ones(1), 1))
        await asyncio.sleep(0)
        assert not push.done()
        await server.abort()
        with pytest.raises(ClusterError, match="another worker failed"):
            await push
        with pytest.raises(ClusterError, match="another worker failed"):
            await server.push(0, 0, np.ones(1), 1)

    asyncio.run(asyncio.wait_for(waits_for_a_turn(), 10))


def test_turns_are_those_of_a_clock():
    speeds = [1.0, 2.5, 0.7]
    turns, clock = Turns(speeds), [(10 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(clock)
    for rank in range(3):
        turns.begin(rank, 10)
    for _ in range(30):
        time, rank = heapq.heappop(clock)
        assert turns.next() == rank
        turns.finish()
        turns.begin(rank, 10)
        heapq.heappush(clock, (time + 10 / speeds[rank], rank))


def test_slices_give_copies():
    server = ParameterSlice(np.zeros(2))
    server.begin(1.0, None)
    reply = server.pull(0, 1)
    server.push(0, 0, np.ones(2), 0)
    assert reply.parameters.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 3}, r"batch_size=3.*at least the number of workers \(4\)"),
        ({"batch_size": 400}, "batch_size=400.*at most 120.*100 samples of it, but one worker has only 30"),
        ({"step": 0}, "step=0"),
        ({"step": 1e9, "epochs": 60}, "step=.*diverged in epoch"),
        ({"pace": "fast"}, "pace='fast'.*once, free"),
        ({"speeds": (1.0, 2.0)}, r"len\(speeds\)=2.*4, one per worker"),
        ({"speeds": (1.0, 0.0, 1.0, 1.0)}, r"speeds\[1\]=0.0"),
    ],
)
def test_parameters_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidParameter, match=message):
        simulate(4, **options)


@pytest.mark.parametrize(
    ("labels", "n_classes", "message"),
    [
        (np.array([0.0, 1.5]), 2, "integers or booleans.*float64"),
        (np.arange(10), 10, "labels occur more than once"),
        (np.array([0, 1, 4]), 4, r"labels in \[0, 4\) \(it contains 4\).*Number the classes"),
        (np.array([-1, 1]), 4, "it contains -1"),
    ],
)
def test_what_are_no_labels_is_refused(labels, n_classes, message):
    with pytest.raises(InvalidParameter, match=message):
        check_labels("y", labels, 10, n_classes)


def test_values_that_are_not_finite_are_named_by_sample(fake_shuffler):
    x = LINE["x"].copy()
    x[77, 1] = np.inf
    with pytest.raises(InvalidParameter, match="sample 77 is not"):
        simulate(4, {**LINE, "x": x})
    [epoch] = fake_shuffler({**LINE, "x": x}, n_workers=1).epochs(1)
    with pytest.raises(InvalidParameter, match=r"features='x'.*sample 77 is not"):
        epoch.map(survey, None, features="x", target="y")[0].result()


def test_staleness_of_nothing():
    assert Staleness.of([[], []]).mean == 0


def test_boolean_labels_are_the_integers():
    labels = BLOBS["y"] > 1
    model = SoftmaxRegression(2)
    parameters = np.random.default_rng(0).standard_normal(8)
    gradient, loss = model.gradient(parameters, BLOBS["x"], labels)
    expected, same = model.gradient(parameters, BLOBS["x"], labels.astype(int))
    np.testing.assert_array_equal(gradient, expected)
    assert loss == same == model.loss(parameters, BLOBS["x"], labels)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (LINE, {"features": "z"}, "features='z'.*one of the dataset's arrays: x, y"),
        (LINE, {"target": "z"}, "target='z'.*one of the dataset's arrays: x, y"),
        (
            {**LINE, "x": LINE["x"][:60]},
            {},
            r"features='x'.*121 samples, the length of ranks \(its shape is \(60, 3\)\)",
        ),
        ({**LINE, "y": LINE["y"][:60]}, {}, r"target='y'.*121 samples, the length of ranks \(its shape is \(60,\)\)"),
        ({**LINE, "y": LINE["y"][:, np.newaxis]}, {}, r"target='y'.*1-D array of numbers \(it is 2-D"),
        ({**LINE, "y": np.where(np.arange(121) == 9, np.nan, 1.0)}, {}, "target='y'.*sample 9 is not"),
    ],
)
def test_a_simulation_refuses_what_does_not_fit(arrays, options, message):
    ranks = np.arange(121) % 2
    with pytest.raises(InvalidParameter, match=message):
        simulate_parameter_server(arrays, ranks, LinearModel(), epochs=1, batch_size=10, step=0.1, **options)


def test_speeds_may_be_any_sequence_and_nobody_is_warned_of_them(caplog):
    _, history = simulate(3, speeds=[1, 1, 0.25])
    assert history.worker_rates == (1.0, 1.0, 0.25)
    assert "slower" not in caplog.text


def test_losses_come_with_the_samples_that_were_counted(fake_shuffler):
    [epoch] = fake_shuffler(LINE, n_workers=3).epochs(1)
    found = [one.result() for one in epoch.map(total_loss, LinearModel(), np.zeros(4), features="x", target="y")]
    assert sum(count for _, count in found) == 121
    assert sum(loss for loss, _ in found) == pytest.approx(np.square(LINE["y"]).sum() / 2)


def test_a_batch_that_workers_cannot_share_equally_is_rounded_and_said(caplog):
    x = np.random.default_rng(0).normal(size=(120, 2))
    arrays, ranks = {"x": x, "y": x @ [1, 2]}, np.arange(120) % 4
    rounded, whole = (
        simulate_parameter_server(arrays, ranks, LinearModel(), epochs=2, batch_size=size, step=0.1)
        for size in (14, 12)
    )
    np.testing.assert_array_equal(rounded.model, whole.model)
    assert rounded.batch_size == whole.batch_size == 12
    assert caplog.messages == ["dshuffle: batch_size=14 on 4 workers is rounded to 12: each takes 3 samples"]
