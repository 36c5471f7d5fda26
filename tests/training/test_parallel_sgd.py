from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, SGDClassifier, SGDRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor

from dshuffle.errors import InvalidParameter
from dshuffle.synthetic import gaussian_blobs
from dshuffle.training import Decay, EarlyStopping, fit_parallel_sgd
from dshuffle.training.parallel_sgd import COEFFICIENTS

BLOBS = {name: array.compute() for name, array in gaussian_blobs(302, n_features=5, n_classes=4).items()}
LINE = {"x": BLOBS["x"], "y": BLOBS["x"] @ np.arange(1, 6)}
CONSTANT = {"learning_rate": "constant", "eta0": 0.01, "shuffle": False}


def arrays_of(model):
    for name in COEFFICIENTS:
        value = getattr(model, name, [])
        yield from value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("estimator", "data"),
    [
        (SGDClassifier(**CONSTANT), BLOBS),
        (SGDRegressor(**CONSTANT), LINE),
        (MLPClassifier(hidden_layer_sizes=6, solver="sgd", momentum=0.0, batch_size=10, shuffle=False), BLOBS),
        (MLPRegressor(hidden_layer_sizes=6, solver="adam", batch_size=10, shuffle=False), LINE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_what_one_process_computes(fake_shuffler, estimator, data):
    shuffler = fake_shuffler(data, n_workers=3)
    history = fit_parallel_sgd(shuffler, estimator, epochs=3, batch_rows=4096, seed=5)
    options = {"classes": np.arange(4)} if data is BLOBS else {}
    common = None
    for epoch in shuffler.epochs(3):
        copies = []
        for partition in epoch.partitions():
            model = clone(estimator).set_params(random_state=5)
            if common is not None:
                model.partial_fit(partition["x"][:10], partition["y"][:10], **options)
                for array, mean in zip(arrays_of(model), common, strict=True):
                    array[...] = mean
                if hasattr(model, "_optimizer"):
                    del model._optimizer
            copies.append(model.partial_fit(partition["x"], partition["y"], **options))
        counts = [len(partition) for partition in epoch.partitions()]
        assert len({*counts}) > 1, "the weights would not matter"
        common = [np.average(arrays, axis=0, weights=counts) for arrays in zip(*map(arrays_of, copies), strict=True)]
    for array, mean in zip(arrays_of(history.model), common, strict=True):
        np.testing.assert_allclose(array, mean, rtol=2e-4, atol=1e-6)
    predicted = history.model.predict(data["x"])
    wrong = np.mean(predicted != data["y"]) if data is BLOBS else None
    error = np.linalg.norm(predicted - data["y"]) / np.linalg.norm(data["y"]) if wrong is None else wrong
    assert history.points[-1].error == pytest.approx(error, rel=1e-5)
    assert not hasattr(estimator, "n_features_in_"), "the user's own estimator is left alone"


def test_schedule_validation_and_early_stopping(fake_shuffler):
    seen = []
    history = fit_parallel_sgd(
        fake_shuffler(LINE),
        SGDRegressor(**CONSTANT),
        epochs=9,
        schedule=Decay(0.5),
        validate=lambda model: {"step": model.eta0},
        early_stopping=EarlyStopping(3, metric="step", least_change=0.0049),
        on_epoch=seen.append,
    )
    # 0.01, then 0.005 is an improvement, and nothing after it can be.
    assert [point.validation["step"] for point in seen] == pytest.approx([0.01 * 0.5**epoch for epoch in range(5)])
    assert history.stopped_early
    assert list(history.points) == seen


@pytest.mark.parametrize(
    ("estimator", "options", "message"),
    [
        (LinearRegression(), {}, "an estimator with partial_fit.*SGDClassifier"),
        (MLPClassifier(solver="lbfgs"), {}, "an estimator with partial_fit"),
        (GaussianNB(), {}, "estimator=.*coef_"),
        (SGDClassifier(average=True), {}, "estimator.average=True"),
        (SGDClassifier(early_stopping=True), {}, "estimator.early_stopping"),
        (SGDClassifier(), {"schedule": Decay()}, "estimator.learning_rate='optimal'"),
        (SGDClassifier(), {"classes": [0, 1, 2]}, "classes=.*all labels of y. Add 3"),
        (SGDClassifier(), {"classes": [0]}, "classes=.*two labels"),
        (SGDClassifier(), {"target": "z"}, "target='z'.*one of the dataset's arrays: x, y"),
        (SGDClassifier(), {"features": "y"}, "features='y'.*2-D array of numbers"),
        (SGDClassifier(), {"epochs": 0}, "epochs=0"),
        (SGDClassifier(), {"batch_rows": 0}, "batch_rows=0"),
        (SGDRegressor(**{**CONSTANT, "eta0": 1e300}), {}, "diverged in epoch 0"),
        (SGDClassifier(), {"x": np.where(np.eye(302, 5, -217), np.nan, BLOBS["x"])}, "sample 2(17|18|19|20|21) is"),
        (SGDClassifier(), {"y": np.linspace(0, 1, 302)}, "integers or booleans.*float64"),
        (SGDClassifier(), {"y": np.zeros(302, int)}, "at least two labels"),
        (SGDClassifier(), {"y": np.zeros((302, 2), int)}, "1-D array.*2-D"),
    ],
)
def test_what_cannot_be_trained_is_refused(fake_shuffler, estimator, options, message):
    arrays = {name: options.get(name, values) for name, values in BLOBS.items()}
    options = {name: value for name, value in options.items() if name not in BLOBS}
    with pytest.raises(InvalidParameter, match=message):
        fit_parallel_sgd(fake_shuffler(arrays), estimator, **{"epochs": 1, **options})


@pytest.mark.parametrize(
    ("estimator", "batch_rows"),
    [(SGDClassifier(), 4096), (MLPClassifier(), 32), (MLPClassifier(batch_size=70), 70)],
)
def test_the_default_batch_suits_the_estimator(fake_shuffler, estimator, batch_rows):
    shuffler = fake_shuffler(BLOBS, n_workers=2)
    default = fit_parallel_sgd(shuffler, estimator, epochs=2)
    explicit = fit_parallel_sgd(shuffler, estimator, epochs=2, batch_rows=batch_rows)
    assert [point.error for point in default.points] == [point.error for point in explicit.points]
    assert default.model.get_params() == {**estimator.get_params(), "random_state": 0}
