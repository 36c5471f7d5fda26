"""MovieLens's ``ratings.csv`` as entries of a matrix, with a fixed number per user. Needs the extra ``parquet``."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.sorted_ids import sorted_positions
from dshuffle.store.sources.source import RowSource, StreamSource, unreadable

USER, MOVIE, RATING = "userId", "movieId", "rating"
_TYPES = {USER: pa.int64(), MOVIE: pa.int64(), RATING: pa.float32()}
# pyarrow parses blocks of about this size; only the rows of one block are in memory.
_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Ratings:
    """Entries (row, column, value) of a users x movies matrix, with ``per_user`` random ratings of each user.

    Users with fewer ratings are left out, as are movies without a drawn rating. The remaining users and movies are
    numbered in the order of their ids. Entries keep the order of the file. The file is read once to count ratings,
    once to find the movies, and once for each array. Each pass holds a few numbers per user and per movie in memory,
    plus one block of the file.

    Parameters
    ----------
    arrays
        ``row`` and ``column``, int32, and ``value``, float32, each ``(per_user * n_users,)``.
    n_users, n_movies
        Number of rows and columns of the matrix.

    References
    ----------
    Chung et al. (2017), section 5.1, which uses 68 ratings of each user of MovieLens 20M; see docs/papers.md.
    """

    arrays: Mapping[str, RowSource]
    n_users: int
    n_movies: int

    @classmethod
    def of(cls, path: str, per_user: int, seed: int, progress: Callable[[int, int, str], None] | None = None) -> Self:
        """Count the ratings of each user, draw ``per_user`` of them and find the movies of the drawn ratings.

        Raises
        ------
        DatasetError
            If the file is not a ``ratings.csv``, or no user has ``per_user`` ratings.
        InvalidParameter
            If ``per_user`` or ``seed`` is not allowed.
        """
        if isinstance(per_user, bool) or not isinstance(per_user, int) or per_user < 1:
            raise InvalidParameter.of("per_user", per_user, "an integer >= 1")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InvalidParameter.of("seed", seed, "an integer >= 0")
        say = progress or (lambda done, total, text: None)
        _check_header(path)
        try:
            say(0, 2, "counting each user's ratings")
            draw = _Draw.of(path, per_user, seed)
            say(1, 2, "finding the movies of the drawn ratings")
            movies = np.empty(0, np.int64)
            for batch in draw.batches(MOVIE):
                movies = np.union1d(movies, batch[MOVIE])
        except DShuffleError:
            raise
        except Exception as exc:
            raise unreadable(path, exc) from exc
        say(2, 2, f"{len(draw.users)} users, {len(movies)} movies")

        def source(dtype: str, column: str, numbers: Callable[[NDArray[Any]], NDArray[Any]]) -> RowSource:
            return StreamSource(
                path,
                (per_user * len(draw.users),),
                np.dtype(dtype),
                lambda: (numbers(batch[column]) for batch in draw.batches(column)),
            )

        arrays = {
            "row": source("i4", USER, lambda ids: np.searchsorted(draw.users, ids)),
            "column": source("i4", MOVIE, lambda ids: np.searchsorted(movies, ids)),
            "value": source("f4", RATING, lambda ratings: ratings),
        }
        return cls(arrays, len(draw.users), len(movies))


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """The random choice of ratings, which is the same in every pass and for any block size."""

    path: str
    per_user: int
    seed: int
    users: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, path: str, per_user: int, seed: int) -> Self:
        users, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for batch in _parsed(path, [USER, MOVIE, RATING]):
            more, n = np.unique(batch[USER], return_counts=True)
            users, where = np.unique(np.concatenate([users, more]), return_inverse=True)
            # Sums are exact: they are below 2^53.
            counts = np.bincount(where, np.concatenate([counts, n])).astype(np.int64)
        if counts.max() < per_user:
            raise DatasetError(
                f"no user of {path} has {per_user} ratings, the maximum is {counts.max()}; draw fewer ratings per user "
                "(--ratings-per-user)"
            )
        enough = counts >= per_user
        return cls(path, per_user, seed, users[enough], counts[enough])

    def batches(self, column: str) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the users and one more column of the drawn ratings."""
        rng = np.random.default_rng(self.seed)
        needed = np.full(len(self.users), self.per_user)
        left = self.counts.copy()
        for batch in _parsed(self.path, list(dict.fromkeys([USER, column]))):
            users = sorted_positions(self.users, batch[USER])
            selected = _draw(users, rng.random(len(users)), needed, left)
            yield {name: values[selected] for name, values in batch.items()}


@kernel()
def _draw(
    users: NDArray[np.int64],
    chances: NDArray[np.float64],
    needed: NDArray[np.int64],
    left: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Selection sampling (Knuth, TAOCP 3.4.2, algorithm S) for all users in one pass; -1 stands for any other user."""
    selected = np.zeros(len(users), np.bool_)
    for i in range(len(users)):
        user = users[i]
        if user >= 0:
            if chances[i] * left[user] < needed[user]:
                selected[i] = True
                needed[user] -= 1
            left[user] -= 1
    return selected


def _check_header(path: str) -> None:
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            parsed = csv.reader(lines)
            header, first = next(parsed, []), next(parsed, None)
    except Exception as exc:
        raise unreadable(path, exc) from exc
    if not set(_TYPES) <= set(header):
        start = ",".join(header)[:60] or "nothing"
        raise DatasetError(
            f"{path} is not a MovieLens ratings.csv: its first line must name userId,movieId,rating, but is {start!r}"
        )
    if first is None:
        raise DatasetError(f"{path} has no ratings")


def _parsed(path: str, columns: list[str]) -> Iterator[dict[str, NDArray[Any]]]:
    reader = pa.csv.open_csv(
        path,
        # With threads pyarrow reads ahead without limit, and its errors do not give the row number.
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK_NBYTES),
        convert_options=pa.csv.ConvertOptions(include_columns=columns, column_types=_TYPES),
    )
    with reader:
        for batch in reader:
            arrays = {}
            for name in columns:
                values = batch.column(name)
                arrays[name] = values.to_numpy(zero_copy_only=False)
                if values.null_count or not np.isfinite(arrays[name]).all():
                    raise DatasetError(f"{path}: column {name!r} has a value that is missing or not finite")
            yield arrays
