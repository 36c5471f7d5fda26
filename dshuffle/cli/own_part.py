"""``dshuffle plan --own-part``: plan one worker's part of an epoch, and measure what that takes."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import STORE, EpochPlanner, ShuffleSpec, WorkerPart
from dshuffle.planning.own_part import OwnPlanner, plans_own_parts
from dshuffle.planning.planner import plan_nbytes
from dshuffle.units import human_bytes, human_count, human_seconds


def measure_own_part(spec: ShuffleSpec, rank: int, epoch: int, ids: Path | None = None) -> dict[str, Any]:
    """Plan the part of a rank, and say what it has to do.

    Parameters
    ----------
    ids
        File for the rank's sample ids in training order, in NumPy's format.

    Returns
    -------
    dict
        ``processor_seconds``; ``extra_bytes``, the peak memory above the start; ``rows`` trained on; ``received`` and
        ``sent``, rows by peer; ``read``, rows from the store; ``planned``, ``"alone"`` or ``"for all workers"``.

    Raises
    ------
    InvalidParameter
        If the rank or the epoch does not exist, the plan does not fit in memory, or the file cannot be written.
    """
    rank = as_integer("own_part", rank, 0)
    spec.check_epoch("epoch", epoch)
    if rank >= spec.n_workers:
        raise InvalidParameter.of("own_part", rank, f"in [0, {spec.n_workers}), the ranks of the workers")
    delivery = spec.choices.delivery
    alone = plans_own_parts(spec, delivery)
    check_memory(spec)
    _part(_small(spec), 0, 1, alone)  # so that no figure includes loading kernels
    _reset_peak()
    start, started = _peak_bytes(), time.process_time()
    part = _part(spec, rank, epoch, alone)
    seconds, extra = time.process_time() - started, max(0, _peak_bytes() - start)
    if ids is not None:
        try:
            with ids.open("wb") as file:
                np.save(file, part.order)
        except OSError as error:
            raise InvalidParameter.of("ids", str(ids), f"a file that can be written ({error})") from error
    peers = range(spec.n_workers)
    return {
        "planned": "alone" if alone else "for all workers",
        "processor_seconds": seconds,
        "extra_bytes": extra,
        "rows": len(part.own),
        "received": [len(part.receives.get(peer, ())) for peer in peers],
        "sent": [len(part.sends.get(peer, ())) for peer in peers],
        "read": len(part.receives.get(STORE, ())),
    }


def check_memory(spec: ShuffleSpec) -> None:
    """Refuse a plan that cannot fit in this machine's memory."""
    needed, available = plan_nbytes(spec), psutil.virtual_memory().available
    if needed > available:
        allowed = (
            f"at most about {spec.n_samples * available // needed}: a plan takes {human_bytes(needed)}, and "
            f"{human_bytes(available)} of memory are available"
        )
        raise InvalidParameter.of("samples", spec.n_samples, allowed)


def own_part_lines(measured: dict[str, Any], rank: int, epoch: int) -> list[str]:
    """The same in sentences."""
    received, sent = measured["received"], measured["sent"]
    lines = [
        f"Rank {rank} trains on {human_count(measured['rows'])} rows in epoch {epoch}.",
        f"It receives {human_count(sum(received))} rows from {sum(map(bool, received))} workers and sends "
        f"{human_count(sum(sent))} rows to {sum(map(bool, sent))}. "
        f"It reads {human_count(measured['read'])} rows of the store.",
        f"Planning this {measured['planned']} took {human_seconds(measured['processor_seconds'])} of processor time "
        f"and {human_bytes(measured['extra_bytes'])} of memory.",
    ]
    if measured["planned"] != "alone":
        lines.append("These choices are planned for all workers, from the first epoch on.")
    return lines


def _small(spec: ShuffleSpec) -> ShuffleSpec:
    """A few samples. What belongs to all samples, their first assignment and balance, is left out."""
    choices = dataclasses.replace(spec.choices, sharding="random", balance=None)
    each = choices.assignment.unit or 1
    return ShuffleSpec(min(spec.n_samples, spec.n_workers * max(16, each)), spec.n_workers, choices)


def _part(spec: ShuffleSpec, rank: int, epoch: int, alone: bool) -> WorkerPart:
    if alone:
        return OwnPlanner(spec, rank).plan(epoch, spec.choices.delivery).part
    planner = EpochPlanner(spec, checks=False)
    plan = planner.load()
    for _ in range(epoch):
        plan = planner.advance()
    return plan.for_worker(rank)


def _reset_peak() -> None:
    """Let the kernel forget the peak so far, where it can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
