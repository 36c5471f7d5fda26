from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.report import TrainingPoint
from dshuffle.training import (
    Decay,
    EarlyStopping,
    Linear,
    fit_linear_regression,
    linear_regression,
)
from dshuffle.training.fit import numbers_of
from dshuffle.training.linear_regression import local_pass


def points_of(errors):
    return [
        TrainingPoint(epoch=epoch, seconds=epoch, error=error, validation={"accuracy": 1 - error})
        for epoch, error in enumerate(errors)
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 5))
def test_stopping_is_due_when_the_best_is_old(errors, patience, least_change):
    stopping = EarlyStopping(patience, least_change)
    best, age = errors[0], 0
    for error in errors[1:]:
        best, age = (error, 0) if error < best - least_change else (best, age + 1)
    assert stopping.is_due(points_of(errors)) == (age >= patience)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12))
def test_more_of_a_metric_can_be_better(errors):
    lowest = EarlyStopping(2).is_due(points_of(errors))
    assert EarlyStopping(2, metric="accuracy", highest=True).is_due(points_of(errors)) == lowest


def test_a_metric_that_nobody_measures_is_refused():
    with pytest.raises(InvalidParameter, match=r"metric='recall'.*one of accuracy, error"):
        EarlyStopping(metric="recall").is_due(points_of([1]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decay(0), "factor=0"),
        (lambda: Decay(1.1), "factor=1.1"),
        (lambda: Linear(0, 3), "last=0"),
        (lambda: Linear(0.1, 1), "epochs=1"),
        (lambda: EarlyStopping(0), "patience=0"),
        (lambda: EarlyStopping(1, float("nan")), "least_change=nan"),
    ],
)
def test_parameters_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        make()


def test_linear_regression_follows_schedule_validation_and_early_stopping(fake_shuffler):
    # One row a worker: each epoch multiplies the error by 1 - step, here 1/2, 3/4, 3/4, ...
    shuffler = fake_shuffler({"x": np.ones((2, 1)), "y": np.ones(2)}, n_workers=2)
    history = fit_linear_regression(
        shuffler,
        epochs=9,
        step=0.5,
        schedule=Linear(0.5, epochs=2),
        validate=lambda weights: {"distance": abs(1 - weights[0])},
        early_stopping=EarlyStopping(2, least_change=0.1, metric="distance"),
    )
    errors = [0.5 * 0.75**epoch for epoch in range(6)]
    assert [point.validation["distance"] for point in history.points] == pytest.approx(errors)
    assert history.stopped_early


def test_a_slow_worker_is_told_of_and_waited_for(threads, monkeypatch, caplog):
    def slow_on_rank_2(partition, *args, **kwargs):
        time.sleep(0.4 if partition.rank == 2 else 0.02)
        return local_pass(partition, *args, **kwargs)

    monkeypatch.setattr(linear_regression, "local_pass", slow_on_rank_2)
    dataset = dshuffle.create_dataset("memory://slow-rank", {"x": np.ones((40, 1)), "y": np.ones(40)}, overwrite=True)
    with dshuffle.Shuffler(threads, dataset) as shuffler:
        assert len(fit_linear_regression(shuffler, epochs=2, step=0.5).points) == 2
    [said] = [message for message in caplog.messages if "rank 2" in message]
    assert re.match(r"dshuffle: rank 2 trained \d+\.\d times as long as the median of the others, which waited", said)


def test_metrics_may_be_tensors_of_one_number(torch):
    weight = torch.tensor([2.0], requires_grad=True)
    metrics = {"loss": (weight * 3).sum(), "accuracy": torch.tensor(0.25), "count": torch.tensor([7]), "float": 0.5}
    numbers = numbers_of(metrics)
    assert numbers == {"loss": 6.0, "accuracy": 0.25, "count": 7.0, "float": 0.5}
    assert {type(value) for value in numbers.values()} == {float}
    with pytest.raises(InvalidParameter, match=r"'accuracy': tensor\(\[1., 1.\]\)"):
        numbers_of({"accuracy": torch.ones(2)})


@pytest.mark.parametrize("returned", [{"accuracy": np.ones(2)}, {"accuracy": "high"}, {"accuracy": None}, 0.5, None])
def test_metrics_that_are_no_numbers_are_refused(returned):
    with pytest.raises(InvalidParameter, match=r"validate is not allowed: it returned .* must return a mapping"):
        numbers_of(returned)
