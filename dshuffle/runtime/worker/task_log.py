"""Leave the consequences of a failure out of the log of a Dask worker.

Dask logs every task that raises an error, with a traceback. If a rank fails or its worker is lost, the other ranks of
:meth:`dshuffle.Epoch.together` raise ``PeerFailed``. That error adds nothing to its cause, and if the worker is
replaced, nothing has failed.
"""

from __future__ import annotations

import logging

from dshuffle.errors import PeerFailed
from dshuffle.runtime.task_keys import session_of_key


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record of Dask's worker is anything but a partition task that failed because another rank did.

    Examples
    --------
    >>> def failure(error):
    ...     args = ("train-dshuffle-0f3a-3-0-1", "long-running", "<Task>", repr(error), "")
    ...     text = "Compute Failed: %s %s %s %r %r"
    ...     return logging.LogRecord("distributed.worker", logging.ERROR, "", 0, text, args, None)
    >>> is_worth_a_line(failure(PeerFailed("rank 0 has failed"))), is_worth_a_line(failure(ValueError("rank 0")))
    (False, True)
    """
    match record.args:
        case (key, _, _, str(error), _) if record.msg.startswith("Compute Failed"):
            return session_of_key(key) is None or not error.startswith(f"{PeerFailed.__name__}(")
    return True


def leave_out_consequences() -> None:
    """Install the filter in this process. Idempotent."""
    logging.getLogger("distributed.worker").addFilter(is_worth_a_line)
