"""Which Dask clients dshuffle can work with, and what they know of their cluster."""

from __future__ import annotations

from typing import Any

from distributed import Client

from dshuffle.errors import ClusterError, InvalidParameter


def check_client(client: Any) -> None:
    """Raise unless the client is a synchronous one that is connected."""
    if not isinstance(client, Client):
        raise InvalidParameter.of("client", client, "a dask.distributed Client")
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a thread of its own.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")


def cluster_info(client: Client) -> dict[str, Any]:
    """What the scheduler says of itself and, under ``"workers"``, of all its workers by address.

    ``Client.scheduler_info`` answers from an attribute that the client itself refreshes every few seconds, without any
    workers, so that now and then there seem to be none.
    """
    assert client.scheduler is not None
    return dict(client.sync(client.scheduler.identity, n_workers=-1))
