"""What a client asks the scheduler for when it opens a session."""

from __future__ import annotations

import dataclasses
import logging

from distributed import Client

from dshuffle.emulated_links import check_emulated_rates
from dshuffle.planning import Choices, Classes, Remainder
from dshuffle.runtime.client.cluster_view import is_adaptive, starts_no_more
from dshuffle.runtime.client.open_session import new_id
from dshuffle.runtime.client.session_state import shuffle_digest
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.runtime.session_spec import DatasetReference, EarlierWorkers, SessionRequest
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


def session_request(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    options: SessionOptions,
    *,
    start: Remainder,
    carried: EarlierWorkers | None = None,
) -> tuple[SessionRequest, Classes | None]:
    """Check a way of shuffling on this dataset and cluster, and read what its plans need from the dataset.

    Returns
    -------
    request : SessionRequest
        The request. Labels travel by name.
    classes : Classes or None
        The labels of ``balance``.
    """
    choices = resolved(dataset, choices)
    options.check_way(choices)
    settings = Settings.from_config(adaptive=is_adaptive(client))
    if (warning := starts_no_more(client, options.choice)) is not None:
        logger.warning("dshuffle: %s", warning)
    check_emulated_rates()  # those of this process, which reads rows as well
    deliveries = {choices.delivery: 0.0}
    if choices.is_auto:
        deliveries = expected_seconds(client, dataset, choices, options, memory_fraction=settings.memory_fraction)
    classes = choices.balance
    if classes is not None:
        choices = dataclasses.replace(choices, balance=Classes(classes.name, classes.checksum))
    request = SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries=deliveries,
        options=options,
        settings=settings,
        start=start,
        kept_as=shuffle_digest(dataset, choices) if options.keep_cache else None,
        carried=carried,
    )
    return request, classes
