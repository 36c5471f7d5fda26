"""The ratings of MovieLens: as many of each user, drawn evenly, the same in every pass over the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import create_dataset, read_ratings

HEADER = "userId,movieId,rating,timestamp"


def write(path: Path, users: Any, movies: Any) -> Path:
    """A file in which the rating of line i is i / 2, so that each tells where it came from."""
    lines = [f"{user},{movie},{i / 2},1112486027" for i, (user, movie) in enumerate(zip(users, movies, strict=True))]
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return path


def entries(tmp_path: Path, file: Path, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    ratings = read_ratings(file, **options)
    dataset = create_dataset(tmp_path / "out", ratings.arrays, overwrite=True)
    return ratings, dataset.read_rows(np.arange(dataset.n_samples))


@pytest.mark.parametrize("by_user", [True, False])
def test_68_ratings_of_each_user_that_has_them(tmp_path: Path, monkeypatch: Any, by_user: bool) -> None:
    monkeypatch.setattr("dshuffle.store.sources.movielens._BLOCK_NBYTES", 1500)  # a user spans blocks
    rng = np.random.default_rng(0)
    counts = {3: 68, 5: 67, 9: 200, 12: 1, 4_000_000_000: 90}
    users = np.repeat(list(counts), list(counts.values()))
    movies = np.concatenate([rng.choice(300, count, replace=False) for count in counts.values()]) * 1000 + 7
    if not by_user:
        order = rng.permutation(len(users))
        users, movies = users[order], movies[order]
    ratings, found = entries(tmp_path, write(tmp_path / "ratings.csv", users, movies))
    assert [found[name].dtype for name in ("row", "column", "value")] == [np.int32, np.int32, np.float32]
    lines = (found["value"] * 2).astype(int)
    assert (np.diff(lines) > 0).all(), "no rating twice, and in the order of the file"
    ids, n_ratings = np.unique(users[lines], return_counts=True)
    assert ids.tolist() == [3, 9, 4_000_000_000]
    assert n_ratings.tolist() == [68, 68, 68]
    np.testing.assert_array_equal(found["row"], np.searchsorted(ids, users[lines]))
    kept, columns = np.unique(movies[lines], return_inverse=True)
    np.testing.assert_array_equal(found["column"], columns)
    assert (ratings.n_users, ratings.n_movies) == (3, len(kept))
    assert len(kept) < len(np.unique(movies)), "else the numbering of columns is not tested"


def test_every_set_of_ratings_is_equally_likely(tmp_path: Path) -> None:
    n_users = 3000
    users, movies = np.repeat(np.arange(n_users), 4), np.tile(np.arange(4), n_users)
    _, found = entries(tmp_path, write(tmp_path / "ratings.csv", users, movies), per_user=2)
    pairs = found["column"].reshape(n_users, 2)
    counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1])
    counts = counts[counts > 0]
    assert len(counts) == 6
    # Chi-squared with 5 degrees of freedom exceeds 25.7 once in 10,000 seeds.
    assert ((counts - n_users / 6) ** 2 / (n_users / 6)).sum() < 25.7


def test_the_seed_decides_and_blocks_do_not(tmp_path: Path, monkeypatch: Any) -> None:
    file = write(tmp_path / "ratings.csv", np.repeat(np.arange(20), 30), np.tile(np.arange(30), 20))
    _, found = entries(tmp_path, file, per_user=7)
    _, other = entries(tmp_path, file, per_user=7, seed=1)
    monkeypatch.setattr("dshuffle.store.sources.movielens._BLOCK_NBYTES", 1000)
    _, again = entries(tmp_path, file, per_user=7)
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in again.items()}
    assert found["value"].tolist() != other["value"].tolist()


def text(folder: Path, *lines: str) -> Path:
    (folder / "ratings.csv").write_text("\n".join(lines))
    return folder / "ratings.csv"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], r"first line must name userId,movieId,rating, but is 'nothing'"),
        (["1::1193::5::978300760"], r"but is '1::1193::5::978300760'"),
        (["userId,movieId,tag,timestamp", "1,2,good,3"], "first line must name"),
        ([HEADER], "has no ratings"),
        ([HEADER, "1,2,3.5,4", "1,3,3.5"], r"cannot read .*ratings\.csv: .*Expected 4 columns, got 3"),
        ([HEADER, "1,2,3.5,4", "one,3,3.5,4"], r"cannot read .*ratings\.csv: .*Row #3.*'one'"),
        ([HEADER, "1,2,3.5,4", "1,,3.5,4"], "column 'movieId' has a value that is missing"),
        ([HEADER, "1,2,inf,4"], "column 'rating' has a value that is missing or not finite"),
        ([HEADER, "1,2,3.5,4", "1,3,3.5,4", "2,3,1,4"], r"no user .* has 68 ratings, the maximum is 2; .*per-user"),
    ],
)
def test_what_is_no_file_of_ratings_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(DatasetError, match=words) as caught:
        read_ratings(text(tmp_path, *lines))
    assert "\n" not in str(caught.value)


def test_parameters_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"ratings\.csv does not exist"):
        read_ratings(tmp_path / "ratings.csv")
    for name, value in (("per_user", 0), ("per_user", 2.0), ("seed", -1)):
        with pytest.raises(InvalidParameter, match=f"{name}={value}"):
            read_ratings(text(tmp_path, HEADER, "1,2,3.5,4"), **{name: value})


def test_a_file_that_has_lost_ratings_since_they_were_counted(tmp_path: Path) -> None:
    users = np.repeat(np.arange(20), 30)
    ratings = read_ratings(write(tmp_path / "ratings.csv", users, users), per_user=7)
    write(tmp_path / "ratings.csv", users[:90], users[:90])
    with pytest.raises(DatasetError, match="was it changed"):
        create_dataset(tmp_path / "out", ratings.arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["ratings.csv"]
