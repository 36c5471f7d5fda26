"""Look for what goes wrong on clusters of many workers, or of unequal ones: open files, threads, memory, resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dshuffle.runtime.measure.finding import Finding, Level, some
from dshuffle.runtime.open_files import files_needed
from dshuffle.runtime.server_resource import SERVER_RESOURCE
from dshuffle.units import human_bytes

FEWEST_FILES = 1024
"""Open files that any process should be allowed, whatever the number of workers: chunks and objects at once."""


def of_open_files(n_workers: int, soft: Mapping[str, int], hard: Mapping[str, int]) -> Finding:
    """Whether all processes may open a connection for each worker.

    Parameters
    ----------
    n_workers
        Number of workers of the cluster.
    soft
        Limits of the client and the scheduler; negative for none.
    hard
        Hard limits of the workers, which raise their soft limits to these.
    """
    needed = max(FEWEST_FILES, files_needed(n_workers))
    why = f"{n_workers} workers need {needed}"
    limited = [f"{where} {limit}" for where, limit in {**soft, **hard}.items() if 0 <= limit < needed]
    if limited:
        remedy = f"Raise the limit to {needed} or more (ulimit -n; for workers the hard limit, ulimit -Hn)."
        return Finding(Level.WARNING, "open files", f"few are allowed: {some(limited)}; {why}", remedy)
    return Finding(Level.OK, "open files", f"at least {needed} are allowed everywhere; {why}")


def of_unequal_workers(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether the workers that train have the same memory and threads: every one gets an equal share."""
    training = {where: facts for where, facts in workers.items() if facts["trains"]}
    for name, fact, in_words, remedy in (
        (
            "memory",
            "memory_limit",
            human_bytes,
            "Every worker gets an equal share, so the one with the least memory limits all. Raise its limit, or leave "
            "it out with workers=.",
        ),
        (
            "threads",
            "threads",
            str,
            "Every worker gets an equal share, so the others wait for the one that trains the slowest. Start equal "
            "workers, or leave it out with workers=.",
        ),
    ):
        values = {where: facts[fact] for where, facts in training.items()}
        if len({*values.values()}) > 1:
            [(usual, _)] = Counter(values.values()).most_common(1)
            exceptions = [f"{where} has {in_words(value)}" for where, value in values.items() if value != usual]
            words = f"workers differ: most have {in_words(usual)}, and {some(exceptions)}"
            yield Finding(Level.WARNING, name, words, remedy)


def of_resources(workers: Mapping[str, Any]) -> Finding | None:
    """Which Dask resources workers have, by which a session may choose them. None if there are none."""
    having: Counter[str] = Counter()
    for worker in workers.values():
        having.update(name for name in worker.get("resources") or {} if name != SERVER_RESOURCE)
    if not having:
        return None
    words = ", ".join(f"{count} of {len(workers)} workers have {name}" for name, count in sorted(having.items()))
    name = min(having)
    return Finding(Level.OK, "resources", f"{words}; resources={{{name!r}: 1}} trains on those alone")
