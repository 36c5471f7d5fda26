"""ShuffledSGD behaves as scikit-learn's estimators do, and trains as `fit_parallel_sgd` does."""

from __future__ import annotations

import dask.array
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import dshuffle
from dshuffle import InvalidParameter, ShuffledSGD
from dshuffle.training import fit_parallel_sgd


@pytest.fixture(scope="module")
def client(cluster_of):
    with cluster_of(2, processes=False) as client:
        yield client


@pytest.fixture(scope="module")
def rows():
    x = np.random.default_rng(0).normal(size=(600, 5))
    return x, (x @ [1, 2, 3, -1, -2] > 0).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [SGDClassifier(random_state=0), SGDRegressor(random_state=0)])
def test_the_checks_of_scikit_learn(client, estimator):
    results = check_estimator(ShuffledSGD(estimator), on_skip=None, on_fail=None)
    failed = {one["check_name"]: one["exception"] for one in results if one["status"] == "failed"}
    assert not failed
    assert sum(one["status"] == "passed" for one in results) > 45


@pytest.mark.slow
def test_it_trains_as_the_trainer_does(client, rows, tmp_path):
    x, y = rows
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": x, "y": y})
    with dshuffle.Shuffler(client, dataset, assignment="partial:0.5", seed=3) as shuffler:
        expected = fit_parallel_sgd(shuffler, SGDClassifier(), epochs=3, batch_rows=50, seed=3).model
    model = ShuffledSGD(SGDClassifier(), epochs=3, assignment="partial:0.5", batch_rows=50, seed=3)
    for given in ((x, y), (dataset,), (tmp_path / "d.zarr",), (str(tmp_path / "d.zarr"),)):
        fitted = clone(model).fit(*given)
        np.testing.assert_array_equal(fitted.estimator_.coef_, expected.coef_)
        assert fitted.classes_.tolist() == [0, 1]
        assert (fitted.n_iter_, len(fitted.records_), fitted.n_features_in_) == (3, 3, 5)
        assert fitted.score(x, y) > 0.9
    lazy = clone(model).fit(dask.array.from_array(x, chunks=(100, 2)), dask.array.from_array(y, chunks=70))
    np.testing.assert_array_equal(lazy.estimator_.coef_, expected.coef_)
    predicted = lazy.predict(dask.array.from_array(x, chunks=(100, 2)))
    np.testing.assert_array_equal(client.compute(predicted, sync=True), fitted.predict(x))


@pytest.mark.parametrize(
    "labels",
    [["no", "yes"], *(pytest.param(pair, marks=pytest.mark.slow) for pair in ([7, 3], [False, True], [1.0, 2.0]))],
    ids=str,
)
def test_labels_of_any_kind(client, rows, labels):
    x, y = rows
    y = np.array(labels)[y]
    model = ShuffledSGD(SGDClassifier(loss="log_loss")).fit(x, y)
    assert model.classes_.tolist() == sorted(labels)
    assert np.mean(model.predict(x) == y) > 0.9
    assert model.predict_proba(x[:4]).shape == (4, 2)
    lazy = ShuffledSGD(SGDClassifier(loss="log_loss")).fit(
        dask.array.from_array(x, chunks=(100, 5)), dask.array.from_array(y, chunks=100)
    )
    assert np.array_equal(lazy.predict(x), model.predict(x))


def test_weights_of_classes_belong_to_the_labels(client, rows):
    x, y = rows
    for labels in ([1, 2], [3, -1]):
        given = np.array(labels)[y]
        model = ShuffledSGD(SGDClassifier(class_weight={labels[0]: 1e-3, labels[1]: 1e3})).fit(x, given)
        assert sorted(labels) == model.estimator_.classes_.tolist() == model.classes_.tolist()
        assert np.mean(model.predict(x) == labels[1]) > np.mean(y) + 0.05
    with pytest.raises(InvalidParameter, match=r"estimator.class_weight is not allowed: the labels are <U3"):
        ShuffledSGD(SGDClassifier(class_weight={"no": 1, "yes": 2})).fit(x, np.array(["no", "yes"])[y])


def test_a_dataset_in_a_pipeline_says_what_to_do(client, rows, tmp_path):
    x, y = rows
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": x, "y": y})
    with pytest.raises(InvalidParameter, match=r"not in memory. Take rows.*or train with ShuffledSGD"):
        make_pipeline(StandardScaler(), ShuffledSGD(SGDClassifier())).fit(dataset)
    assert make_pipeline(ShuffledSGD(SGDClassifier())).fit(dataset).score(x, y) > 0.9


@pytest.mark.slow
def test_worker_processes_read_arrays_from_a_folder(rows, tmp_path, cluster_of):
    x, y = rows
    with cluster_of(2, processes=True):
        model = ShuffledSGD(SGDClassifier(), folder=str(tmp_path)).fit(
            dask.array.from_array(x), dask.array.from_array(y)
        )
        assert model.score(x, y) > 0.9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": StandardScaler()}, "estimator=.*partial_fit|coef_"),
        ({"epochs": 0}, "epochs=0"),
        ({"assignment": "glob"}, "assignment='glob'"),
        ({"session": {"colour": 1}}, "colour"),
        ({"folder": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_fitted(client, rows, changes, message):
    model = ShuffledSGD(**{"estimator": SGDClassifier(), **changes})
    with pytest.raises((InvalidParameter, TypeError, FileNotFoundError), match=message):
        model.fit(*rows)


def test_a_dataset_has_its_own_target_and_a_fit_needs_a_client(client, rows, tmp_path):
    x, y = rows
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"rows": x, "label": y})
    with pytest.raises(InvalidParameter, match="the dataset has the target"):
        ShuffledSGD(SGDClassifier()).fit(dataset, y)
    named = ShuffledSGD(SGDClassifier(), features="rows", target="label").fit(dataset)
    assert named.score(x, y) > 0.9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dshuffle.training.estimator.default_client", lambda: (_ for _ in ()).throw(ValueError("none")))
        with pytest.raises(InvalidParameter, match=r"there is no Dask client. Make one before: Client"):
            ShuffledSGD(SGDClassifier()).fit(x, y)


def test_blocks_without_rows_are_predicted(client, rows):
    x, y = rows
    model = ShuffledSGD(SGDClassifier()).fit(x, y)
    lazy = dask.array.from_array(x, chunks=(100, 5))
    few = lazy[dask.array.from_array(np.arange(600) >= 450, chunks=100)]
    np.testing.assert_array_equal(client.compute(model.predict(few), sync=True), model.predict(x[450:]))


def test_a_fit_that_fails_leaves_the_earlier_one(client, rows, monkeypatch):
    x, y = rows
    model = ShuffledSGD(SGDClassifier()).fit(x, np.array(["a", "b"])[y])
    before = model.predict(x[:5]).tolist()
    monkeypatch.setattr("dshuffle.training.estimator.fit_parallel_sgd", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, np.array(["x", "y"])[y])
    assert model.predict(x[:5]).tolist() == before


@pytest.mark.slow
def test_in_a_pipeline_and_a_search(client, rows):
    x, _ = rows
    pipeline = make_pipeline(StandardScaler(), ShuffledSGD(SGDRegressor(), epochs=2))
    search = GridSearchCV(pipeline, {"shuffledsgd__estimator__alpha": [1e-4, 1.0]}, cv=2, error_score="raise")
    target = x @ np.arange(5.0)
    assert search.fit(x * 100, target).best_params_ == {"shuffledsgd__estimator__alpha": 1e-4}
    assert search.score(x * 100, target) > 0.9
