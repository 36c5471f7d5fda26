"""What a client asks the scheduler for when it opens a session."""

from __future__ import annotations

import dataclasses
import os
import uuid

from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import AUTO, Choices, Classes, Remainder
from dshuffle.planning.cost import Cluster
from dshuffle.runtime.cluster_view import is_adaptive
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.memory import parse_memory_limit
from dshuffle.runtime.session_spec import DatasetReference, SessionRequest, Settings
from dshuffle.store import Dataset


def session_request(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    *,
    on_loss: str,
    first_epoch: int,
    memory_limit: int | str | None,
    server: str | int | None,
    cluster: Cluster | None,
    cache_directory: str | os.PathLike[str] | None,
    remainder: Remainder | None,
) -> tuple[SessionRequest, Classes | None]:
    """Check the parameters of a :class:`dshuffle.Shuffler`, and read what its plans need from the dataset.

    Returns
    -------
    request : SessionRequest
        The request. Labels travel by name.
    classes : Classes or None
        The labels of ``balance``.
    """
    if cluster is not None and choices.delivery != AUTO:
        raise InvalidParameter.of(
            "cluster", cluster, f"None with delivery={choices.delivery!r}", "Only delivery='auto' uses it."
        )
    choices = resolved(dataset, choices)
    settings = Settings.from_config(adaptive=is_adaptive(client))
    server = None if server is None else str(server)
    deliveries = {choices.delivery: 0.0}
    if choices.delivery == AUTO:
        deliveries = expected_seconds(
            client, dataset, choices, cluster=cluster, server=server, memory_fraction=settings.memory_fraction
        )
    classes = choices.balance
    if classes is not None:
        choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
    request = SessionRequest(
        session_id=uuid.uuid4().hex[:12],
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries=deliveries,
        memory_limit=parse_memory_limit(memory_limit),
        server=server,
        settings=settings,
        on_loss=on_loss,
        first_epoch=as_integer("first_epoch", first_epoch, 0),
        remainder=remainder,
        cache_directory=None if cache_directory is None else os.fspath(cache_directory),
    )
    return request, classes
