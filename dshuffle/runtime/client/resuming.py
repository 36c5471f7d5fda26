"""Continue a session from its state or checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dshuffle.runtime.client.checkpoint_file import CheckpointFile
from dshuffle.runtime.client.checkpoints import checkpoint_place, read_checkpoint
from dshuffle.runtime.client.session_state import SessionState
from dshuffle.store import Dataset


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a session continues.

    Parameters
    ----------
    state
        The state of the earlier session.
    keywords
        Keywords of the shuffler that continues it.
    checkpoint
        The checkpoint that the state comes from, if the new session goes on to write it; otherwise None.
    """

    state: SessionState
    keywords: dict[str, Any]
    checkpoint: CheckpointFile | None = None


@contextlib.contextmanager
def resumption(
    dataset: Dataset, state: Mapping[str, Any] | str | os.PathLike[str], options: Mapping[str, Any]
) -> Iterator[Resumption]:
    """Read a state or a checkpoint, from which the body opens a session.

    No other session can write the checkpoint meanwhile. The session that the body opens releases it; an error in the
    body does so, too.

    Parameters
    ----------
    dataset
        Dataset of the session.
    state
        The state, or the place of a checkpoint.
    options
        What the user has chosen for the new session.

    Raises
    ------
    CheckpointError
        If the state is damaged, or one of another dataset or of a release that draws other samples.
    InvalidParameter
        If an option contradicts the state.
    """
    checkpoint = None
    try:
        if not isinstance(state, Mapping):
            options = {"checkpoint": state, **options}
            target = options["checkpoint"]
            if target is not None and checkpoint_place(target) == checkpoint_place(state):
                # Before it is read: a session that is still open may be about to write it.
                checkpoint = CheckpointFile(target, dataset, new=False)
            state = read_checkpoint(state, dataset)
        earlier = SessionState.from_dict(state, dataset)
        yield Resumption(earlier, earlier.keywords(dataset, options), checkpoint)
    except BaseException:
        if checkpoint is not None:
            checkpoint.release()
        raise
