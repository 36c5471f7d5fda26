"""Matrix completion by SGD in conflict-free rounds."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_indices, as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.randomness import permutation
from dshuffle.runtime import Epoch, Partition, PerRank, Shuffler, gathered
from dshuffle.training.fit import (
    FLOATS,
    INTEGERS,
    FitOptions,
    History,
    Trained,
    check_array,
    check_converging,
    check_step,
    run_epochs,
    trainer,
)

Vector = NDArray[np.float64]
Factor = NDArray[np.float32]
PERMUTATIONS = ("every epoch", "once", "never")
"""When to permute the columns, from the most to the least random."""

ROUNDS = 3
"""How often the biases of columns and of rows are fitted to what the others leave. On MovieLens, further rounds change
the held-out squared error by about 0.1 %."""

FIRST_PRODUCTS = 0.03
"""Standard deviation of the first products of the factors, as a fraction of that of the values they are fitted to.
Larger products begin as noise. Where a row or column has few entries, it stays unless the regularization is strong."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A completed matrix: a mean, a bias of each row and of each column, and the product of two factors.

    Parameters
    ----------
    left, right
        Float32 ``(n_rows, rank)`` and ``(n_columns, rank)``. A row or column without entries has zeros.
    mean, row_bias, column_bias
        Mean of the entries, and float64 ``(n_rows,)`` and ``(n_columns,)``.
    """

    left: Factor
    right: Factor
    mean: float
    row_bias: Vector
    column_bias: Vector

    @property
    def baseline(self) -> Factors:
        """The same with factors of rank 0."""
        return dataclasses.replace(self, left=self.left[:, :0], right=self.right[:, :0])

    def predict(self, row: NDArray[np.integer], column: NDArray[np.integer]) -> Vector:
        """Return the value of the entries at rows and columns, float64 ``(entries,)``."""
        products = np.einsum("ij,ij->i", self.left[row], self.right[column], dtype=np.float64)
        value: Vector = self.mean + self.row_bias[row] + self.column_bias[column] + products
        return value


def first_factors(epoch: Epoch, sizes: Mapping[str, int], rank: int, seed: int) -> Factors:
    """Fit mean and biases to the entries of all workers, and draw factors of independent normal numbers.

    The standard deviation of their products is a fraction of that of what mean and biases leave.
    """
    bias = {name: np.zeros(size) for name, size in sizes.items()}
    counts, sums, squares = _added(epoch, "row", bias, 0.0)
    n_entries, mean = counts.sum(), float(sums.sum() / counts.sum())
    for name in ("column", "row") * ROUNDS:
        counts, sums, squares = _added(epoch, name, bias | {name: np.zeros_like(bias[name])}, mean)
        bias[name] = shrunk_means(counts, sums, squares)
        # The squares of what is left, with the new biases.
        squares += float(np.sum(bias[name] * (counts * bias[name] - 2 * sums)))
    scale = FIRST_PRODUCTS * float(np.sqrt(max(squares, 0.0) / n_entries))
    rng, factor = np.random.default_rng(seed), np.float32((scale * rank**-0.5) ** 0.5)
    left, right = (rng.standard_normal((size, rank), np.float32) * factor for size in sizes.values())
    return Factors(left, right, mean, bias["row"], bias["column"])


def shrunk_means(counts: Vector, sums: Vector, squares: float) -> Vector:
    """Return the mean of each group, shrunk towards 0 the more, the less its values tell about it.

    If groups do not differ by more than chance explains, all means are 0.

    Parameters
    ----------
    counts, sums
        ``(groups,)`` number of values in each group, which may be 0, and their sums.

    Notes
    -----
    The means are taken for normal numbers with mean 0 and variance t, and the values for normal numbers around them
    with variance s. Both variances are estimated by the method of moments. The expectation of a mean, if n values of
    its group are known, is their sum divided by n + s / t.

    References
    ----------
    G. K. Robinson, "That BLUP is a good thing", Statistical Science, 1991.
    """
    seen = counts > 0
    n_values, n_groups = counts.sum(), np.count_nonzero(seen)
    between = float(np.sum(sums[seen] ** 2 / counts[seen]))
    within = max(squares - between, 0.0) / (n_values - n_groups) if n_values > n_groups else np.inf
    variance = (between - n_groups * within) / n_values
    if not variance > 0:
        return np.zeros(len(counts))
    means: Vector = sums * variance / np.where(seen, counts * variance + within, 1)
    return means


def _sums_of_rest(
    partition: Partition, name: str, biases: dict[str, Vector], mean: float
) -> tuple[Vector, Vector, float]:
    """Add up what mean and biases leave of a partition's entries, by row or by column."""
    rest = partition["value"] - mean - biases["row"][partition["row"]] - biases["column"][partition["column"]]
    groups, size = partition[name], len(biases[name])
    counts = np.bincount(groups, minlength=size).astype(np.float64)
    return counts, np.bincount(groups, rest, minlength=size).astype(np.float64), float(rest @ rest)


def _added(epoch: Epoch, *args: Any) -> Any:
    """Return number of entries and sum of values of each row or column, and the sum of the squares of all values."""
    return [np.sum(each, axis=0) for each in zip(*gathered(epoch.map(_sums_of_rest, *args)), strict=True)]


def split_entries(row: ArrayLike, n_workers: int, *, held_out: float = 0.1, seed: int = 0) -> NDArray[np.int32]:
    """Give every worker whole rows of a matrix and equally many of their entries, and hold out the other entries.

    :func:`fit_matrix_completion` needs all training entries of a row on one worker, and a sharding needs equal shares.
    If rows have different numbers of entries, as users have of ratings, both are possible only without some entries.
    They become the test set.

    Parameters
    ----------
    row
        ``(entries,)`` integers, the row of each entry.
    n_workers
        Number of workers. There must be at least as many rows.
    held_out
        Smallest fraction of a worker's entries to hold out, in [0, 1). Workers that got more entries hold out more.
    seed
        Random seed of the entries that are held out.

    Returns
    -------
    (entries,) int32
        The worker of each entry, or -1 if it is held out. For a :class:`~dshuffle.Shuffler`, the ranks that are not -1
        are the ``sharding`` of the training entries, with the assignment ``"local"``.

    Raises
    ------
    InvalidParameter
        If ``row`` is not a 1-D array of integers, a number is out of range, or a worker would have no entries.

    Notes
    -----
    Rows go to the workers from the largest to the smallest, each to the worker with the fewest entries so far.

    Examples
    --------
    >>> rank = split_entries([7, 7, 7, 8, 8, 9, 9], n_workers=2, held_out=0)
    >>> rank[:3], np.bincount(rank[rank >= 0])
    (array([0, 0, 0], dtype=int32), array([3, 3]))
    """
    ratio, rows = as_ratio("held_out", held_out, Fraction(0)), as_indices("row", row, 2**63 - 1, "rows")
    names, places, counts = np.unique(rows, return_inverse=True, return_counts=True)
    if len(names) < as_integer("n_workers", n_workers, 1):
        raise InvalidParameter.of("n_workers", n_workers, f"at most {len(names)}, the number of rows with entries")
    loads = [(0, rank) for rank in range(n_workers)]
    owner = np.empty(len(names), np.int32)
    for place in np.argsort(-counts, kind="stable"):
        load, owner[place] = loads[0]
        heapq.heapreplace(loads, (load + int(counts[place]), int(owner[place])))
    share = int(loads[0][0] * (1 - ratio))
    if not share:
        raise InvalidParameter.of("held_out", held_out, "small enough to leave every worker an entry")
    candidates, ranks = owner[places], np.full(len(rows), -1, np.int32)
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    for rank in range(n_workers):
        ranks[rng.permutation(np.flatnonzero(candidates == rank))[:share]] = rank
    return ranks


@trainer("models")
def fit_matrix_completion(
    shuffler: Shuffler,
    *,
    n_rows: int,
    n_columns: int,
    rank: int,
    epochs: int,
    step: float,
    regularization: float = 0.0,
    seed: int = 0,
    permute_columns: str = "every epoch",
    test: tuple[NDArray[Any], ...] | None = None,
    **options: Unpack[FitOptions],
) -> History[Factors]:
    """Complete a matrix by SGD over its known entries, in conflict-free rounds.

    The matrix is completed by the mean of the known entries, a bias of each row and of each column, and the product of
    two factors.

    Parameters
    ----------
    shuffler
        Shuffler of a dataset of entries with the arrays ``row`` and ``column`` (integers) and ``value`` (floats). All
        entries of a matrix row must be on one worker. If entries are sorted by row and each row has 68 of them, use
        ``assignment="chunks:68"``. If rows have different numbers of entries, use :func:`split_entries`.
    n_rows, n_columns
        Shape of the matrix.
    rank
        Number of columns of the factors.
    epochs
        Number of passes over all entries.
    step
        Step of the first epoch.
    regularization
        ``mu`` of P5 and P6. Ratings need it: many rows and columns have few entries, and without it the factors fit
        the noise, so that ``test_error`` ends above ``baseline_error``. A tenth of the mean number of entries of a row
        is a good value to begin with.
    seed
        Seed of the initial factors and of the permutations of the columns.
    permute_columns
        How columns are put into blocks: by a new random permutation in ``"every epoch"``, by one permutation
        (``"once"``), or in the order of their numbers (``"never"``). If columns are numbered by popularity, blocks in
        that order have very unequal sizes, and every round waits for the largest. Permute such columns at least once.
    test
        Rows, columns and values of entries to measure the test error on. It is ``test_error`` in a point's
        ``validation``, beside ``baseline_error``, the error of mean and biases alone.
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`. ``validate`` adds its metrics to the errors
        on ``test``.

    Returns
    -------
    History
        ``model`` is the fitted :class:`Factors`. A point's ``error`` is ``sum (X - M)^2 / sum M^2`` over all entries,
        each measured just before its own update.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, an entry is outside the matrix or not finite, a matrix row is on several workers,
        or the factors diverge.

    Notes
    -----
    The shuffler's assignment permutes the rows, and ``permute_columns`` the columns. The columns are cut into as many
    blocks as there are workers. In round r, worker k takes its entries in column block k + r, so two workers never
    touch the same row of either factor. The result is the same as in one process that takes the blocks of each round
    one after the other.

    Mean and biases are fitted once, at the beginning of the first epoch, and the factors to what they leave. A bias is
    shrunk towards 0 if its row or column has few entries, and all biases if rows or columns hardly differ by more than
    chance explains. Entries of a row or column that
    has no training entry are predicted by the mean and the other bias.

    Between rounds, a block of the right factor moves from worker to worker, n_columns * rank * 4 bytes a round in
    total. Both factors pass through the client once an epoch, in both directions. The factors of all rounds stay on the
    workers until the epoch ends.

    References
    ----------
    Chung et al. (2017), section 5.1, equations P5 and P6, where we take f as half the squared error; see
    docs/papers.md. B. Recht and C. Ré, "Parallel stochastic gradient algorithms for large-scale matrix completion",
    2013, for the rounds. Y. Koren, R. Bell and C. Volinsky, "Matrix factorization techniques for recommender systems",
    2009, for the biases.
    """
    sizes = {"row": n_rows, "column": n_columns}
    for name, number in (("n_rows", n_rows), ("n_columns", n_columns), ("rank", rank)):
        as_integer(name, number, 1)
    check_step(step)
    if not 0 <= regularization < np.inf:
        raise InvalidParameter.of("regularization", regularization, "a finite number >= 0")
    if permute_columns not in PERMUTATIONS:
        raise InvalidParameter.of("permute_columns", permute_columns, f"one of {PERMUTATIONS}")
    for name, kinds in (("row", INTEGERS), ("column", INTEGERS), ("value", FLOATS)):
        check_array(name, name, shuffler.dataset.arrays, 1, kinds)
    validate = options.get("validate")

    def metrics(factors: Factors) -> dict[str, Any]:
        own = dict(validate(factors)) if validate else {}
        if test is not None:
            *places, value = test
            for name, model in (("test_error", factors), ("baseline_error", factors.baseline)):
                wrong = np.sum((model.predict(*places) - value) ** 2)
                own[name] = wrong / np.sum(np.square(value, dtype=np.float64))
        return own

    def train(epoch: Epoch, number: int, model: Factors | None, factor: float) -> Trained:
        rows, columns, squares = zip(*gathered(epoch.map(survey, sizes)), strict=True)
        owned, counts = np.concatenate(rows), np.sum(columns, axis=0)
        if len(np.unique(owned)) < len(owned):
            raise InvalidParameter.because(
                "assignment",
                "it puts entries of one matrix row on several workers",
                'Sort the entries by row, and use "chunks:ENTRIES" with the number of entries per row. If rows have '
                "different numbers of entries, use split_entries.",
            )
        if sum(squares) == 0:
            raise InvalidParameter.because("value", "all its entries are zero", "Use a dataset with non-zero values.")
        if model is None:
            model = first_factors(epoch, sizes, rank, seed)
            model.left[np.setdiff1d(np.arange(n_rows), owned)] = 0
            model.right[counts == 0] = 0
        n, order = len(rows), np.arange(n_columns)
        if permute_columns != "never":
            order = permutation(n_columns, "columns", seed, number if permute_columns == "every epoch" else 0)
        blocks = np.array_split(order, n)
        entries = PerRank(epoch.map(entries_by_block, blocks, model.baseline))
        states = PerRank([(model.left[own], None, 0.0) for own in rows])
        rights = PerRank([model.right[block] for block in blocks])
        # The client waits only for the last round. Each task depends on the tasks whose results it needs.
        for turn in range(n):
            if turn:
                moved = epoch.map(_second, states)
                rights = PerRank([*moved[1:], moved[0]])
            trained = PerRank([counts[blocks[(k + turn) % n]] for k in range(n)])
            settings = turn, states, rights, trained, step * factor, regularization
            states = PerRank(epoch.map(one_round, entries, *settings))
        # Copies, as the factors of the epoch before may be saved later.
        model = dataclasses.replace(model, left=model.left.copy(), right=model.right.copy())
        done = gathered(states.values)
        for own, block, (left, right, _) in zip(rows, [blocks[-1], *blocks], done, strict=False):
            model.left[own], model.right[block] = left, right
        wrong = sum(errors for _, _, errors in done)
        check_converging(f"step={step:g}", number, wrong, model.left, model.right)
        return Trained(model, float(wrong / sum(squares)))

    options["validate"] = metrics
    return run_epochs(shuffler, "fit_matrix_completion", None, train, epochs, **options)


def survey(partition: Partition, sizes: Mapping[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64], float]:
    """Return a partition's matrix rows, ascending, its number of entries in every column, and their sum of squares."""
    for name in ("row", "column", "value"):
        array, limit = partition[name], sizes.get(name)
        good = np.isfinite(array) if limit is None else (array >= 0) & (array < limit)
        if not good.all():
            bad = int(np.argmin(good))
            allowed = "finite" if limit is None else f"in [0, {limit})"
            raise InvalidParameter.of(f"{name}[{partition.sample_ids[bad]}]", array[bad].item(), allowed)
    squares = float(np.sum(np.square(partition["value"], dtype=np.float64)))
    counts = np.bincount(partition["column"], minlength=sizes["column"])
    return np.unique(partition["row"]).astype(np.int64), counts, squares


def entries_by_block(
    partition: Partition, blocks: Sequence[NDArray[np.int64]], baseline: Factors
) -> tuple[NDArray[Any], ...]:
    """Sort a partition's entries by column block, and within a block in training order.

    Returns indices into the worker's own rows and into the columns of the block, what the baseline leaves of the
    values, the first entry of each block, and the number of entries of each row.
    """
    starts = np.cumsum([0, *map(len, blocks)])
    place_of = np.empty(starts[-1], np.int64)
    place_of[np.concatenate(blocks)] = np.arange(starts[-1])
    value = partition["value"] - baseline.predict(partition["row"], partition["column"])
    place = place_of[partition["column"]]
    block = np.searchsorted(starts, place, side="right") - 1
    order = np.argsort(block, kind="stable")
    _, row, row_counts = np.unique(partition["row"], return_inverse=True, return_counts=True)
    firsts = np.searchsorted(block[order], np.arange(len(blocks) + 1))
    place = (place - starts[block])[order]
    return row[order].astype(np.int64), place, value[order].astype(np.float32), firsts, row_counts


def one_round(
    partition: Partition,
    entries: tuple[NDArray[Any], ...],
    turn: int,
    before: tuple[Factor, Factor | None, float],
    right: Factor,
    column_counts: NDArray[np.int64],
    step: float,
    regularization: float,
) -> tuple[Factor, Factor, float]:
    """Train on the worker's entries in one column block.

    Takes and returns the state after a round: the factor of the worker's rows, that of its column block, and the sum of
    squared errors over this epoch so far.
    """
    partition.mark_trained(0)
    row, column, value, starts, row_counts = entries
    n = len(starts) - 1
    block = (partition.rank + turn) % n
    part = slice(starts[block], starts[block + 1])
    # Copies, as values that Dask holds must not change.
    left, right = np.array(before[0]), np.array(right)
    decays = (step * regularization / np.maximum(counts, 1) for counts in (row_counts, column_counts))
    wrong = update_factors(left, right, row[part], column[part], value[part], *decays, step)
    if turn == n - 1:
        partition.mark_trained()
    return left, right, before[2] + wrong


@kernel("(f4[:,::1], f4[:,::1], i8[::1], i8[::1], f4[::1], f8[::1], f8[::1], f8)")
def update_factors(left, right, row, column, value, left_decay, right_decay, step):  # type: ignore[no-untyped-def]
    """Apply P5 and P6 for every entry in turn, in place; return the sum of squared errors before each update.

    Parameters
    ----------
    left, right
        Float32 ``(rows, rank)`` and ``(columns, rank)``, changed in place.
    row, column, value
        ``(entries,)`` int64, int64, float32.
    left_decay, right_decay
        Float64 ``(rows,)`` and ``(columns,)``: ``mu * step`` divided by the number of entries of the row or column.
    """
    total = 0.0
    for k in range(value.size):
        i, j = row[k], column[k]
        error = -float(value[k])
        for r in range(left.shape[1]):
            error += left[i, r] * right[j, r]
        total += error * error
        for r in range(left.shape[1]):
            old = left[i, r]
            left[i, r] = (1 - left_decay[i]) * old - step * error * right[j, r]
            right[j, r] = (1 - right_decay[j]) * right[j, r] - step * error * old
    return total


def _second(partition: Partition, values: tuple[Any, ...]) -> Any:
    """Return one of a task's results, so that the other results stay on their worker."""
    return values[1]
