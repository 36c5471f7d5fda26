"""Write MovieLens's ratings.csv as a matrix of users x movies, with the same number of random ratings of each user.

    pip install -e ".[parquet]"
    python pipelines/movielens_ratings.py ratings.csv ratings.zarr --per-user 68
    dshuffle run pipelines/matrix_completion.py url=ratings.zarr entries_a_row=68

The dataset has ``row`` and ``column``, int32, and ``value``, float32. Users with fewer ratings are left out, as are
movies without a drawn rating. The others are numbered in the order of their ids. Entries keep the order of the file.

References
----------
Chung et al. (2017), section 5.1, which uses 68 ratings of each user of MovieLens 20M. D. E. Knuth, "The Art of Computer
Programming", section 3.4.2, algorithm S.
"""

from __future__ import annotations

from typing import Any

import click
import numba
import numpy as np
from numpy.typing import NDArray

import dshuffle

TYPES = {"userId": "int64", "movieId": "int64", "rating": "float32"}


def read_ratings(path: str) -> dict[str, NDArray[Any]]:
    """The users, movies and ratings of a file, 20 bytes for each rating."""
    from pyarrow import csv

    try:
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(include_columns=list(TYPES), column_types=TYPES))
    except (OSError, KeyError, ValueError) as error:
        raise click.ClickException(f"{path} is not a ratings.csv of MovieLens: {error}") from error
    ratings = {name: table[name].to_numpy() for name in TYPES}
    if not len(table) or any(column.null_count for column in table.columns) or not np.isfinite(ratings["rating"]).all():
        raise click.ClickException(f"{path} has no ratings, or a value that is missing or not finite")
    return ratings


def drawn(ratings: dict[str, NDArray[Any]], per_user: int, seed: int) -> dict[str, NDArray[Any]]:
    """Draw ``per_user`` ratings of each user who has them."""
    _, users, counts = np.unique(ratings["userId"], return_inverse=True, return_counts=True)
    if counts.max() < per_user:
        raise click.ClickException(f"no user has {per_user} ratings, the maximum is {counts.max()}; lower --per-user")
    needed = np.where(counts >= per_user, per_user, 0)
    chances = np.random.default_rng(seed).random(len(users))
    compiled: Any = numba.njit(selected)
    chosen = compiled(users, chances, needed, counts)
    numbers = {
        name: np.unique(ratings[column][chosen], return_inverse=True)[1].astype(np.int32)
        for name, column in (("row", "userId"), ("column", "movieId"))
    }
    return {**numbers, "value": ratings["rating"][chosen]}


def selected(
    users: NDArray[np.int64], chances: NDArray[np.float64], needed: NDArray[np.int64], left: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Selection sampling for all users in one pass."""
    chosen = np.zeros(len(users), np.bool_)
    for i in range(len(users)):
        user = users[i]
        if chances[i] * left[user] < needed[user]:
            chosen[i] = True
            needed[user] -= 1
        left[user] -= 1
    return chosen


@click.command()
@click.argument("file")
@click.argument("url")
@click.option("--per-user", type=click.IntRange(1), default=68, show_default=True, help="Ratings of each user.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the draw.")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
def main(file: str, url: str, per_user: int, seed: int, overwrite: bool) -> None:
    """Write the ratings of FILE to URL."""
    try:
        arrays = drawn(read_ratings(file), per_user, seed)
        made = dshuffle.create_dataset(url, arrays, overwrite=overwrite)
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error).replace("overwrite=True", "--overwrite")) from error
    users, movies = (1 + int(arrays[name].max()) for name in ("row", "column"))
    print(f"{made.n_samples:,} ratings of {movies:,} movies by {users:,} users: {made.url}")


if __name__ == "__main__":
    main()
