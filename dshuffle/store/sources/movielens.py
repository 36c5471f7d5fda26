"""MovieLens's ``ratings.csv`` as entries of a matrix, a fixed number of each user's. Needs pyarrow, an extra."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numba
import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter
from dshuffle.store.sources.source import RowSource, StreamSource, unreadable

USER, MOVIE, RATING = "userId", "movieId", "rating"
_TYPES = {USER: pa.int64(), MOVIE: pa.int64(), RATING: pa.float32()}
# pyarrow parses about this much at a time; the rows of a block are what is in memory.
_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Ratings:
    """Entries (row, column, value) of a users x movies matrix: ``per_user`` ratings of each user, at random.

    Users with fewer ratings are left out, and so are movies that no drawn rating is of; those that are left
    are numbered in the order of their ids. Entries stand in the order of the file. The file is read once to
    count, once to find the movies, and once for each array: no pass holds more than one number a user and one
    a movie, besides a block of the file.

    Parameters
    ----------
    arrays
        ``row`` and ``column``, int32, and ``value``, float32, each ``(per_user * n_users,)``.
    n_users, n_movies
        Rows and columns of the matrix.

    References
    ----------
    Chung et al. (2017), section 5.1: of the MovieLens 20m ratings, 68 of each user.
    """

    arrays: Mapping[str, RowSource]
    n_users: int
    n_movies: int

    @classmethod
    def of(cls, path: str, per_user: int, seed: int, progress: Callable[[int, int, str], None] | None = None) -> Self:
        """Count the ratings of each user and find the movies of those that are drawn.

        Raises
        ------
        DatasetError
            If the file is no ``ratings.csv``, or no user has rated so many movies.
        InvalidParameter
            If ``per_user`` or ``seed`` makes no sense.
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
            say(1, 2, "finding the movies of the ratings drawn")
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
    """Which ratings are drawn: the same ones in every pass, whatever the blocks."""

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
                f"no user of {path} has {per_user} ratings, the most are {counts.max()}; draw fewer of each "
                "(--ratings-per-user)"
            )
        enough = counts >= per_user
        return cls(path, per_user, seed, users[enough], counts[enough])

    def batches(self, column: str) -> Iterator[dict[str, NDArray[Any]]]:
        """The drawn ratings, with their users and one more column."""
        rng = np.random.default_rng(self.seed)
        needed = np.full(len(self.users), self.per_user)
        left = self.counts.copy()
        for batch in _parsed(self.path, list(dict.fromkeys([USER, column]))):
            place = np.minimum(np.searchsorted(self.users, batch[USER]), len(self.users) - 1)
            known = self.users[place] == batch[USER]
            drawn = _draw(place, known, rng.random(len(place)), needed, left)
            yield {name: values[drawn] for name, values in batch.items()}


@numba.njit(nogil=True, cache=True)
def _draw(
    users: NDArray[np.int64],
    known: NDArray[np.bool_],
    chances: NDArray[np.float64],
    needed: NDArray[np.int64],
    left: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Selection sampling (Knuth, TAOCP 3.4.2, algorithm S), for all users side by side."""
    drawn = np.zeros(len(users), np.bool_)
    for i in range(len(users)):
        if known[i]:
            user = users[i]
            if chances[i] * left[user] < needed[user]:
                drawn[i] = True
                needed[user] -= 1
            left[user] -= 1
    return drawn


def _check_header(path: str) -> None:
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            parsed = csv.reader(lines)
            header, first = next(parsed, []), next(parsed, None)
    except Exception as exc:
        raise unreadable(path, exc) from exc
    if not set(_TYPES) <= set(header):
        found = ",".join(header)[:60] or "nothing"
        raise DatasetError(
            f"{path} is no ratings.csv of MovieLens: its first line must name userId,movieId,rating, but is {found!r}"
        )
    if first is None:
        raise DatasetError(f"{path} has no ratings")


def _parsed(path: str, columns: list[str]) -> Iterator[dict[str, NDArray[Any]]]:
    reader = pa.csv.open_csv(
        path,
        # Threads would read ahead without bound; and with them errors lack the number of the row.
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
