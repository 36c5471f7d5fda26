"""Which Dask clients dshuffle can work with."""

from __future__ import annotations

from distributed import Client

from dshuffle.errors import ClusterError, InvalidParameter


def check_client(client: Client) -> None:
    """Raise unless the client is a synchronous one that is connected."""
    if client.asynchronous:
        raise InvalidParameter.of("client", client, "a synchronous Client", "Call dshuffle from a thread of its own.")
    if client.status != "running":
        raise ClusterError(f"the Dask client is {client.status}; make a new one")
