"""Opening a session: what a user asks for is checked against dataset and cluster."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings

from distributed import Client

from dshuffle.emulated_links import check_emulated_rates
from dshuffle.errors import MixingWarning
from dshuffle.planning import Choices, Classes, Remainder
from dshuffle.runtime.client.checkpoint_file import CheckpointFile
from dshuffle.runtime.client.cluster_view import (
    is_adaptive,
    keep_nannies,
    log_if_slow,
    resolved_choice,
    starts_no_more,
    wait_for_workers,
    warn_of_absent_names,
)
from dshuffle.runtime.client.epoch_sequence import EpochSequence, Membership
from dshuffle.runtime.client.open_session import OpenSession, new_id
from dshuffle.runtime.client.session_client import install_plugin
from dshuffle.runtime.client.session_state import Resumption, SessionPosition, shuffle_digest
from dshuffle.runtime.dataset_inputs import resolved, warn_of_small_classes
from dshuffle.runtime.measure.auto_candidates import expected_seconds
from dshuffle.runtime.process import Timeline
from dshuffle.runtime.session_spec import DatasetReference, EarlierWorkers, SessionOptions, SessionRequest
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


SHUFFLER_CALL = 3
"""Stack level of warnings: they point to the call of :class:`dshuffle.Shuffler`."""


def open_sequence(
    client: Client,
    dataset: Dataset,
    choices: Choices,
    options: SessionOptions,
    *,
    first_epoch: int,
    checkpoint: str | os.PathLike[str] | None,
    resumed: Resumption | None,
) -> EpochSequence:
    """Open a session, and write its first checkpoint.

    Parameters
    ----------
    first_epoch
        The first epoch, unless the session continues another one.
    checkpoint
        Where the state is to be written, if anywhere.
    resumed
        The session that this one continues, if any.

    Raises
    ------
    DShuffleError
        If no session can be opened. Nothing stays open then.
    """
    timeline = Timeline("the client opens a session")
    start, carried = Remainder(first_epoch, ()), None
    if resumed is not None:
        start, carried = resumed.state.next, EarlierWorkers.of(resumed.state.history, resumed.state.next)
    request, classes = session_request(client, dataset, choices, options, start=start, carried=carried)
    file = _checkpoint_file(checkpoint, dataset, resumed)
    timeline.end_step("request checked")
    sequence, release = None, keep_nannies(client)
    try:
        membership = _opened(client, request, timeline)
        state = None if resumed is None else resumed.state
        position = SessionPosition(dataset, request.choices, start, lambda: membership.current.history, state)
        sequence = EpochSequence(client, dataset, membership, position, file, release)
        if advice := sequence.choices.assignment.warning(membership.current.n_workers):
            warnings.warn(advice, MixingWarning, stacklevel=SHUFFLER_CALL)
        warn_of_absent_names(client, request.choices.shares)
        if classes is not None:
            warn_of_small_classes(classes, membership.current.n_workers, stacklevel=SHUFFLER_CALL)
        sequence.write_checkpoint()  # one that cannot be written is refused now
        timeline.end_step("checkpoint written")
    except BaseException:  # also if warnings are turned into errors
        if sequence is not None:
            sequence.close()
        release()
        if file is not None:
            file.release()
        raise
    timeline.log()
    return sequence


def _checkpoint_file(
    url: str | os.PathLike[str] | None, dataset: Dataset, resumed: Resumption | None
) -> CheckpointFile | None:
    if url is None:
        return None
    if resumed is not None:
        return resumed.checkpoint or CheckpointFile(url, dataset)
    file = CheckpointFile(url, dataset)
    try:
        file.check_empty()
    except BaseException:
        file.release()
        raise
    return file


def _opened(client: Client, request: SessionRequest, timeline: Timeline) -> Membership:
    with log_if_slow("the scheduler and the workers are being set up"):
        install_plugin(client)
    timeline.end_step("plugins installed on the scheduler and all workers")
    options = request.options
    if options.min_workers > 1:
        limit = "dshuffle.timeout"
        wait_for_workers(client, options.min_workers, request.settings.timeout, limit=limit, choice=options.choice)
    request = dataclasses.replace(request, choice=resolved_choice(client, options))
    timeline.end_step("workers waited for")
    with log_if_slow("a session is being opened: workers are set up, and open the dataset"):
        membership = Membership(OpenSession(client, request))
    timeline.end_step("session opened")
    return membership
