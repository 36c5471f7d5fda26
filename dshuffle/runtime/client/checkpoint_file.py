"""The checkpoint of an open session: no other session writes it, until this one is closed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from dshuffle.runtime.client.checkpoint_lock import checkpoint_lock
from dshuffle.runtime.client.checkpoints import PATIENCE, check_no_checkpoint, checkpoint_place, write_checkpoint
from dshuffle.store import Dataset


class CheckpointFile:
    """A checkpoint that this session has for itself.

    Parameters
    ----------
    url
        The file or object, as the user names it.
    dataset
        Dataset of the session.
    new
        Whether the folder is made if it does not exist.

    Raises
    ------
    CheckpointError
        If another open session has it, or it cannot be written.
    """

    def __init__(self, url: str | os.PathLike[str], dataset: Dataset, *, new: bool = True) -> None:
        self.url = url
        self._dataset = dataset
        self._was_written = False
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(checkpoint_lock(checkpoint_place(url), new=new))

    def check_empty(self) -> None:
        """Refuse to overwrite the state of another session.

        Raises
        ------
        CheckpointError
            If there is one.
        """
        check_no_checkpoint(self.url, self._dataset)

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state. The first one must succeed at once; later ones are tried again for some seconds."""
        patience = PATIENCE if self._was_written else 0.0
        write_checkpoint(self.url, state, self._dataset, patience=patience, was_written=self._was_written)
        self._was_written = True

    def release(self) -> None:
        """Leave the checkpoint to other sessions. Idempotent."""
        self._lock.close()
