"""Open files of a worker: how many it may have, and how many a session needs."""

from __future__ import annotations

import logging
import resource

OWN_FILES = 64
"""Files that a worker needs beside its connections to other workers: those of Dask, kernels, and chunks being read."""

MOST_OUTGOING = 512
"""Connections that a worker opens to others at a time. Dask's pool of connections has this limit."""

MOST_IDLE = 256
"""Connections without a request that a worker keeps from one exchange to the next."""

logger = logging.getLogger(__name__)


def files_needed(connections: int) -> int:
    """Open files of a worker that exchanges messages with some others.

    Each pair of workers has a connection for the requests of either side.

    Examples
    --------
    >>> files_needed(20), files_needed(1000)
    (104, 1576)
    """
    return OWN_FILES + connections + min(connections, MOST_OUTGOING)


def raise_limit() -> int | None:
    """Raise the soft limit of this process to the hard one, and return it; None if there is none.

    The soft limit is often 1,024, because programs that call ``select`` cannot use more. Dask does not call it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS refuses more than its kernel allows
            logger.debug("dshuffle: the limit of open files stays at %d: %s", soft, error)
        else:
            logger.debug("dshuffle: the limit of open files is raised from %d to %d", soft, hard)
            soft = hard
    return None if soft == resource.RLIM_INFINITY else soft


def too_few_files(limits: dict[str, int | None], connections: int) -> str:
    """What to do if some workers may not have enough open files; empty if all may.

    Parameters
    ----------
    limits
        Address of each worker, and how many open files it may have; None for any number.
    connections
        Number of others with which a worker exchanges messages.
    """
    needed = files_needed(connections)
    low = {address: limit for address, limit in limits.items() if limit is not None and limit < needed}
    if not low:
        return ""
    address, least = min(low.items(), key=lambda item: (item[1], item[0]))
    return (
        f"{len(low)} of {len(limits)} workers may have fewer than the {needed} open files that this session needs, "
        f"{address} only {least}. Raise the hard limit there (ulimit -Hn, or LimitNOFILE= of a systemd unit), or use "
        "delivery='grid', with which a worker connects to fewer others"
    )
