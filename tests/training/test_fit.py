from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import InvalidParameter
from dshuffle.report import TrainingPoint
from dshuffle.training import (
    Decay,
    EarlyStopping,
    Linear,
    Network,
    epoch_bar,
    fit_linear_regression,
    fit_synchronous_sgd,
    linear_regression,
)
from dshuffle.training import fit as monitoring
from dshuffle.training.fit import Recorder, WorkerSpeeds
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
    with pytest.raises(InvalidParameter, match=r"metric='recall'.*one of error, accuracy"):
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
    with pytest.raises(InvalidParameter, match="step_decay"):
        fit_linear_regression(shuffler, epochs=1, step=0.1, step_decay=0.9, schedule=Decay(0.9))


@pytest.mark.slow
def test_a_slow_worker_is_told_of_and_waited_for(fake_shuffler, monkeypatch, caplog):
    def slow_on_rank_2(partition, *args, **kwargs):
        time.sleep(0.2 if partition.rank == 2 else 0.02)
        return local_pass(partition, *args, **kwargs)

    monkeypatch.setattr(linear_regression, "local_pass", slow_on_rank_2)
    monkeypatch.setattr(monitoring, "NOTICEABLE", 0.1)
    shuffler = fake_shuffler({"x": np.ones((40, 1)), "y": np.ones(40)}, n_workers=4)
    history = fit_linear_regression(shuffler, epochs=3, step=0.5)
    assert len(history.points) == 3
    assert len(history.worker_rates) == 4
    assert history.worker_rates[2] < min(history.worker_rates[:2]) / 2
    assert "worker 2 trained" in caplog.text
    caplog.clear()
    monkeypatch.setattr(monitoring, "NOTICEABLE", 20)  # in epochs of so few seconds it is noise
    assert len(fit_linear_regression(shuffler, epochs=2, step=0.5).worker_rates) == 4
    assert not caplog.text


def test_progress_is_a_line_an_epoch_where_there_is_no_terminal(fake_shuffler, capsys):
    shuffler = fake_shuffler({"x": np.ones((4, 1)), "y": np.ones(4)}, n_workers=2)
    with epoch_bar(3) as bar:
        fit_linear_regression(shuffler, epochs=3, step=0.5, validate=lambda weights: {"bias": 2.0}, on_epoch=bar)
    first, _, last = capsys.readouterr().err.splitlines()
    assert first.startswith("1/3 error 0.250, bias 2.00 after")
    assert last.startswith("3/3 error")
    with epoch_bar(1) as bar:  # of a function that reports no error
        bar(TrainingPoint(epoch=0, seconds=1.5, error=float("nan")))
    assert capsys.readouterr().err == "1/1 after 1.5 s\n"
    with pytest.raises(InvalidParameter, match="epochs=0"), epoch_bar(0):
        pass


def test_the_first_epoch_does_not_make_short_ones_long_enough_to_tell(caplog):
    """It compiles and imports."""
    for longest, told in (([9.0, 0.03], 0), ([9.0, 0.9, 0.8], 1), ([0.9], 1), ([0.1, 0.1], 0)):
        caplog.clear()
        speeds = WorkerSpeeds()
        for seconds in longest:
            speeds.add([100.0, 100.0, 10.0], seconds=seconds)
        speeds.warn()
        assert len(caplog.messages) == told


def test_metrics_may_be_tensors(torch):
    weight = torch.tensor([2.0], requires_grad=True)
    metrics = {"loss": (weight * 3).sum(), "accuracy": torch.tensor(0.25), "count": torch.tensor([7]), "float": 0.5}
    recorder = Recorder(validate=lambda model: metrics)
    recorder.add(None, 1.0)
    [point] = recorder.points
    assert point.validation == {"loss": 6.0, "accuracy": 0.25, "count": 7.0, "float": 0.5}
    assert {type(value) for value in point.validation.values()} == {float}


@pytest.mark.parametrize("returned", [{"accuracy": np.ones(2)}, {"accuracy": "high"}, {"accuracy": None}, 0.5, None])
def test_metrics_that_are_no_numbers_are_refused(returned):
    with pytest.raises(InvalidParameter, match=r"validate is not allowed: it returned .* must return a mapping"):
        Recorder(validate=lambda model: returned).add(None, 1.0)


def test_a_tensor_of_several_numbers_is_refused(torch):
    with pytest.raises(InvalidParameter, match=r"'accuracy': tensor\(\[1., 1.\]\)"):
        Recorder(validate=lambda model: {"accuracy": torch.ones(2)}).add(None, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_epoch": 5}, "on_epoch=5 .*a function of one argument: a TrainingPoint"),
        ({"on_epoch": lambda: None}, r"on_epoch=.*one argument: a TrainingPoint.*Its parameters are \(\)"),
        (
            {"validate": lambda model, data: {}},
            r"validate=.*one argument: the model. Its parameters are",
        ),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_training(fake_shuffler, options, message):
    with pytest.raises(InvalidParameter, match=message):
        fit_linear_regression(fake_shuffler({"x": np.eye(8), "y": np.ones(8)}), epochs=1, step=0.1, **options)


def test_functions_with_optional_arguments_and_functions_in_c_are_called(fake_shuffler):
    points = []
    for on_epoch in (points.append, print, lambda point, stream=None: points.append(point)):
        fit_linear_regression(fake_shuffler({"x": np.eye(8), "y": np.ones(8)}), epochs=1, step=0.1, on_epoch=on_epoch)
    assert [point.epoch for point in points] == [0, 0]


@pytest.mark.parametrize(
    ("fit", "options", "message"),
    [
        (fit_linear_regression, {"features": "images"}, "features='images' .* 2-D array .*it is 3-D"),
        (fit_linear_regression, {"target": "x"}, "target='x' .* 1-D array .*it is 2-D"),
        (fit_synchronous_sgd, {"network": Network((4, 2)), "features": "images"}, "features='images' .*it is 3-D"),
        (fit_synchronous_sgd, {"network": Network((5, 2))}, r"network.sizes\[0\]=5 .*must be 4, the width of x"),
    ],
)
def test_arrays_of_another_shape_are_refused_before_tasks_run(threads, tmp_path, monkeypatch, fit, options, message):
    """Each task that fails would log a traceback on its worker."""
    arrays = {"x": np.zeros((30, 4)), "images": np.zeros((30, 2, 2)), "y": np.zeros(30, int)}
    batches = {} if fit is fit_linear_regression else {"batch_size": 2}
    with Shuffler(threads, create_dataset(tmp_path / "d.zarr", arrays)) as shuffler:
        monkeypatch.setattr(Shuffler, "epochs", lambda *_: pytest.fail("an epoch has begun"))
        with pytest.raises(InvalidParameter, match=message):
            fit(shuffler, epochs=1, step=0.1, **batches, **options)
