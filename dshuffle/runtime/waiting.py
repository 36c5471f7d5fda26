"""Wait for the workers of a cluster."""

from __future__ import annotations

from dask.utils import parse_timedelta
from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.runtime.cluster_view import cluster_info


def as_seconds(name: str, value: str | float) -> float:
    """Return the seconds of a parameter, which is a number or text such as ``"5m"``.

    Examples
    --------
    >>> as_seconds("patience", "5m")
    300.0
    """
    try:
        return float(parse_timedelta(value))
    except (KeyError, ValueError, TypeError) as error:
        raise InvalidParameter.of(name, value, 'seconds, or text such as "5m"') from error


def wait_for_workers(client: Client, min_workers: int, patience: str | float) -> None:
    """Wait until a cluster has a number of workers.

    Raises
    ------
    ClusterError
        If there are not enough in time.
    """
    as_integer("min_workers", min_workers, 1)
    seconds = as_seconds("patience", patience)
    try:
        client.wait_for_workers(min_workers, timeout=seconds)
    except TimeoutError as error:
        information = cluster_info(client)
        there, address = len(information["workers"]), information["address"]
        raise ClusterError(
            f"there are {there} workers after {seconds:g} s; min_workers={min_workers}. Start more, or wait longer "
            "(patience). If workers or their jobs run, look at their logs: they must reach the scheduler at "
            f"{address}"
        ) from error
