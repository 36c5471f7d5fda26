"""What a client asks the scheduler for when it opens a session."""

from __future__ import annotations

import dataclasses
import logging
import os

from distributed import Client

from dshuffle.checks import as_integer
from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, Classes, GivenSharding, Remainder
from dshuffle.planning.cost import ClusterRates
from dshuffle.runtime.cluster_view import is_adaptive, starts_no_more
from dshuffle.runtime.dataset_inputs import STRATIFIED, resolved
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.memory import parse_memory_limit
from dshuffle.runtime.open_session import new_id
from dshuffle.runtime.session_spec import LOCAL, Carried, DatasetReference, SessionRequest
from dshuffle.runtime.session_state import shuffle_digest
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


def session_request(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    *,
    on_loss: str | None,
    first_epoch: int,
    memory_limit: int | str | None,
    server: str | int | None,
    cluster: ClusterRates | None,
    cache_directory: str | os.PathLike[str] | None,
    keep_cache: bool,
    remainder: Remainder | None,
    carried: Carried | None,
    elastic: bool,
    min_workers: int,
) -> tuple[SessionRequest, Classes | None]:
    """Check the parameters of a :class:`dshuffle.Shuffler`, and read what its plans need from the dataset.

    Returns
    -------
    request : SessionRequest
        The request. Labels travel by name.
    classes : Classes or None
        The labels of ``balance``.
    """
    if not (cluster is None or isinstance(cluster, ClusterRates)):
        raise InvalidParameter.of("cluster", cluster, "None or a ClusterRates, as dshuffle.measure_cluster returns it")
    if cluster is not None and not choices.is_auto:
        raise InvalidParameter.of(
            "cluster", cluster, f"None with delivery={choices.delivery!r}", "Only delivery='auto' uses it."
        )
    choices = resolved(dataset, choices)
    if not isinstance(elastic, bool):
        raise InvalidParameter.of("elastic", elastic, "True or False")
    if elastic and on_loss not in (None, "shrink"):
        raise InvalidParameter.of("on_loss", on_loss, "'shrink', or left out, in an elastic session")
    if on_loss is None:
        on_loss = "shrink" if elastic else "replace"
    sharding = choices.sharding
    if on_loss == "shrink" and isinstance(sharding, GivenSharding) and not sharding.name.startswith(STRATIFIED):
        hint = "It is for one number of workers. Use 'random', 'contiguous', 'round-robin' or 'stratified:LABELS'."
        name = "elastic" if elastic else "on_loss='shrink'"
        raise InvalidParameter.because(name, f"the sharding {str(sharding)!r} was given", hint)
    directory = _directory(cache_directory)
    if not isinstance(keep_cache, bool):
        raise InvalidParameter.of("keep_cache", keep_cache, "True or False")
    if keep_cache and directory in (None, LOCAL):
        hint = "Give a folder on a local disk that is still there when the next job runs."
        raise InvalidParameter.because("keep_cache=True", f"cache_directory={directory!r} does not outlive a job", hint)
    settings = Settings.from_config(adaptive=is_adaptive(client))
    if (said := starts_no_more(client)) is not None:
        logger.warning("dshuffle: %s", said)
    if isinstance(server, bool) or not (server is None or isinstance(server, str | int)):
        raise InvalidParameter.of("server", server, "None, or the name or address of a worker")
    server = None if server is None else str(server)
    check_emulated_rates()  # those of this process, which reads rows as well
    deliveries = {choices.delivery: 0.0}
    if choices.is_auto:
        deliveries = expected_seconds(
            client, dataset, choices, cluster=cluster, server=server, memory_fraction=settings.memory_fraction
        )
    classes = choices.balance
    if classes is not None:
        choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
    request = SessionRequest(
        session_id=new_id(),
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
        carried=carried,
        cache_directory=directory,
        kept_as=shuffle_digest(dataset, choices) if keep_cache else None,
        elastic=elastic,
        min_workers=as_integer("min_workers", min_workers, 1),
    )
    return request, classes


def _directory(cache_directory: str | os.PathLike[str] | None) -> str | None:
    """The folder for rows on each worker.

    Raises
    ------
    InvalidParameter
        If it is not an absolute path. Workers have other working directories than the client.
    """
    if cache_directory is None or cache_directory == LOCAL:
        return cache_directory
    path = os.fspath(cache_directory) if isinstance(cache_directory, str | os.PathLike) else None
    if not isinstance(path, str) or not os.path.isabs(path):
        allowed = f"None, {LOCAL!r}, or the absolute path of a folder on a local disk of every worker"
        raise InvalidParameter.of("cache_directory", cache_directory, allowed)
    return path
