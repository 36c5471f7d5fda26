"""Parallel SGD by scikit-learn's convention: an estimator that shuffles between workers and can be fitted like others.

Only who asks for it imports this module, because it imports scikit-learn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Self

import dask.array
import numpy as np
from distributed import default_client
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone, is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_X_y, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.runtime import Shuffler
from dshuffle.store import Dataset, create_dataset, open_dataset
from dshuffle.training.parallel_sgd import fit_parallel_sgd


def _has(name: str) -> Any:
    return available_if(lambda self: hasattr(getattr(self, "estimator_", self.estimator), name))


class ShuffledSGD(MetaEstimatorMixin, BaseEstimator):
    """Train a scikit-learn estimator by parallel SGD on the current Dask client, with samples shuffled every epoch.

    It has the methods of scikit-learn's estimators, and takes the place of dask-ml's ``Incremental``, which trains on
    one block after the other in their stored order.

    Parameters
    ----------
    estimator
        Estimator with ``partial_fit`` and coefficients that can be averaged, such as ``SGDClassifier``. It is cloned.
    epochs
        Number of passes over the samples.
    assignment, delivery
        Way of shuffling, as for :class:`dshuffle.Shuffler`.
    batch_rows
        Rows per call of ``partial_fit``. None suits the estimator; see :func:`~dshuffle.training.fit_parallel_sgd`.
    seed
        Seed of the shuffles, and replacement for a ``random_state`` of None.
    features, target
        Names of the arrays, if ``fit`` gets a dataset.
    folder
        Folder that this process and all workers see, such as one on a shared file system. ``fit`` keeps a copy of its
        arrays there for as long as it lasts. By default the system's folder for temporary files, which suits a local
        cluster.
    session
        Further parameters of :class:`dshuffle.Shuffler` by name, such as ``{"on_loss": "raise"}``.

    Attributes
    ----------
    estimator_
        The fitted estimator. If labels are neither integers nor booleans, its classes are their numbers.
    classes_
        For a classifier: ``(n_classes,)`` labels in ascending order.
    history_
        :class:`~dshuffle.training.History` of the epochs.
    records_
        List of the :class:`~dshuffle.EpochRecord` of each epoch.
    n_features_in_, n_iter_
        Numbers of features and of epochs.

    Raises
    ------
    InvalidParameter
        If ``fit`` finds no Dask client, or cannot train with the estimator or the data. It is a ValueError.

    Notes
    -----
    The coefficients depend on the number of workers, because each trains a copy before they are averaged.

    References
    ----------
    See :func:`~dshuffle.training.fit_parallel_sgd`.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> from sklearn.linear_model import SGDClassifier
    >>> x = np.random.default_rng(0).normal(size=(400, 3))
    >>> y = np.where(x.sum(axis=1) > 0, "above", "below")
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0"):
    ...     model = ShuffledSGD(SGDClassifier(random_state=0), epochs=5).fit(x, y)
    >>> model.score(x, y) > 0.95, model.predict([[1, 1, 1]]).tolist()
    (True, ['above'])
    """

    def __init__(
        self,
        estimator: Any,
        *,
        epochs: int = 5,
        assignment: str = "global",
        delivery: str = "peer",
        batch_rows: int | None = None,
        seed: int = 0,
        features: str = "x",
        target: str = "y",
        folder: str | None = None,
        session: Mapping[str, Any] | None = None,
    ) -> None:
        self.estimator = estimator
        self.epochs = epochs
        self.assignment = assignment
        self.delivery = delivery
        self.batch_rows = batch_rows
        self.seed = seed
        self.features = features
        self.target = target
        self.folder = folder
        self.session = session

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        for name in ("estimator_type", "classifier_tags", "regressor_tags", "target_tags"):
            setattr(tags, name, getattr(inner, name))
        return dataclasses.replace(tags, input_tags=dataclasses.replace(tags.input_tags, sparse=False))

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train from the beginning.

        Parameters
        ----------
        X
            ``(n_samples, n_features)`` NumPy or Dask array of numbers. Or a :class:`dshuffle.Dataset`, or its URL.
        y
            ``(n_samples,)`` labels or numbers; None with a dataset, which has the target itself.

        Returns
        -------
        ShuffledSGD
            The same object.
        """
        try:
            client = default_client()
        except ValueError as error:
            hint = "Make one before: Client(...), or Client(cluster)."
            raise InvalidParameter.because("ShuffledSGD.fit", "there is no Dask client", hint) from error
        as_integer("epochs", self.epochs, 1)
        session = {"assignment": self.assignment, "delivery": self.delivery, "seed": self.seed, **(self.session or {})}
        with self._dataset(X, y) as (dataset, labels), Shuffler(client, dataset, **session) as shuffler:
            history = fit_parallel_sgd(
                shuffler,
                clone(self.estimator),
                epochs=self.epochs,
                features=self.features if y is None else "x",
                target=self.target if y is None else "y",
                batch_rows=self.batch_rows,
                seed=self.seed,
            )
        self.estimator_ = history.model
        self.history_, self.records_, self.n_iter_ = history, shuffler.records, len(history.points)
        self.n_features_in_ = self.estimator_.n_features_in_
        if is_classifier(self):
            self.classes_ = self.estimator_.classes_ if labels is None else labels
        return self

    @contextlib.contextmanager
    def _dataset(self, X: Any, y: Any) -> Iterator[tuple[Dataset, NDArray[Any] | None]]:
        """The samples as a dataset; and the labels, if it has their numbers instead."""
        if isinstance(X, Dataset | str | os.PathLike):
            if y is not None:
                raise InvalidParameter.because("y", "the dataset has the target", "Leave it out, and name it: target=.")
            yield X if isinstance(X, Dataset) else open_dataset(X), None
            return
        labels, classifies = None, is_classifier(self)
        if not (lazy := isinstance(X, dask.array.Array) and isinstance(y, dask.array.Array)):
            if y is None:
                raise InvalidParameter.because("y", "requires y to be passed, but the target y is None", "Pass it.")
            validate_data(self, X, skip_check_array=True)  # notes names of columns
            X, y = check_X_y(X, y, y_numeric=not classifies, estimator=self)
            if classifies:
                check_classification_targets(y)
            else:
                y = y.astype(np.float64)
        if classifies:
            labels = dask.array.unique(y).compute() if lazy else np.unique(y)
            if len(labels) < 2:
                raise InvalidParameter.of("y", labels.tolist(), "labels of at least two classes, not one class")
            if labels.dtype.kind in "biu":  # the trainer takes these as they are
                labels = None
        if labels is not None:
            if isinstance(getattr(self.estimator, "class_weight", None), Mapping):
                reason = f"the labels are {labels.dtype}"
                raise InvalidParameter.because("estimator.class_weight", reason, "Encode them as integers first.")
            numbers = functools.partial(np.searchsorted, labels)
            y = y.map_blocks(numbers, dtype=np.int64) if lazy else numbers(y)
        with tempfile.TemporaryDirectory(prefix="shuffled-sgd-", dir=self.folder) as place:
            yield create_dataset(f"{place}/rows.zarr", {"x": X, "y": y}), labels

    def predict(self, X: Any) -> Any:
        """Predict labels or numbers of NumPy rows, or lazily of the rows of a Dask array."""
        check_is_fitted(self)
        if isinstance(X, dask.array.Array):
            dtype = self.classes_.dtype if is_classifier(self) else np.float64

            def of_block(rows: NDArray[Any]) -> NDArray[Any]:  # a filter may have left no rows
                return self.predict(rows) if len(rows) else np.empty(0, dtype)

            return X.rechunk({1: -1}).map_blocks(of_block, drop_axis=1, dtype=dtype)
        predictions = self.estimator_.predict(self._rows(X))
        if not is_classifier(self):
            return predictions
        return self.classes_[np.searchsorted(self.estimator_.classes_, predictions)]

    @_has("predict_proba")
    def predict_proba(self, X: ArrayLike) -> Any:
        """Predict the probability of each class: ``(n_samples, n_classes)``."""
        rows = self._rows(X)
        return self.estimator_.predict_proba(rows)

    @_has("decision_function")
    def decision_function(self, X: ArrayLike) -> Any:
        """Return the distance to the separating plane of each class."""
        rows = self._rows(X)
        return self.estimator_.decision_function(rows)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the accuracy of a classifier, or the coefficient of determination of a regressor."""
        metric = accuracy_score if is_classifier(self) else r2_score
        return float(metric(y, self.predict(X), sample_weight=sample_weight))

    def _rows(self, X: ArrayLike) -> Any:
        check_is_fitted(self)
        return validate_data(self, X, reset=False)
