"""Assignments: the rules for which worker trains on which sample in each epoch.

Without weights, share sizes differ by at most one sample, or with ``chunks`` by at most one chunk's rows.
Every assignment is a function of the seed, the epoch and the workers. ``local``, ``partial`` and ``aligned:Q`` also
depend on the previous assignment. ``aligned`` also depends on the holders of each sample.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.aligned import Aligned
from dshuffle.planning.assignment.balance import Classes
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.rules import Chunks, Global, Local, Partial
from dshuffle.planning.epoch_plan import missing_samples
from dshuffle.planning.types import Holders, Ranks, as_holders

__all__ = [
    "ASSIGNMENTS",
    "Aligned",
    "Assignment",
    "Chunks",
    "Draw",
    "EpochDraw",
    "Global",
    "Local",
    "Partial",
    "check_balance",
    "known_assignments",
    "next_ranks",
    "parse_assignment",
]

ASSIGNMENTS: dict[str, type[Assignment]] = {rule.name: rule for rule in (Local, Partial, Global, Aligned, Chunks)}
"""Every assignment by name."""


def known_assignments() -> str:
    """How assignments can be written, for error messages."""
    return ", ".join(rule.forms for rule in ASSIGNMENTS.values())


def parse_assignment(assignment: str | Assignment) -> Assignment:
    """Parse the name of an assignment; an :data:`Assignment` is returned unchanged."""
    if isinstance(assignment, Assignment):
        return assignment
    if isinstance(assignment, str):
        name, _, parameter = assignment.partition(":")
        if name in ASSIGNMENTS:
            try:
                return ASSIGNMENTS[name].parse(parameter if ":" in assignment else None)
            except ValueError:  # InvalidParameter is a ValueError too; show the whole text that the user typed
                pass
    raise InvalidParameter.of("assignment", assignment, known_assignments())


def next_ranks(
    assignment: Assignment,
    previous: ArrayLike,
    n_workers: int,
    *,
    seed: int,
    epoch: int,
    holders: ArrayLike | None = None,
    classes: Classes | None = None,
) -> Ranks:
    """Compute the assignment of an epoch from the previous one, without the history of a session."""
    # ``partial`` has slots for samples, which sessions fill from epoch to epoch. Here the samples of each worker are in
    # ascending order. So the first draw equals a session's first draw from the same assignment, unless the sharding is
    # ``"random"``. Later draws differ from the session's, but have the same distribution.
    # Nguyen et al. (2022), Algorithm 1 (``Partial``); see docs/papers.md. There, a random permutation of the ranks says
    # where sample i of every worker goes. It may send a sample to its own worker, so about 1/M of the exchanges move
    # nothing. We shift the ranks by a random distance that is not zero, in a random order, so that exactly ``ceil(Q N /
    # M)`` samples leave and enter every worker.
    # previous: ``(q,)`` integers, the assignment of epoch ``epoch - 1``.
    # holders: ``(q, words)`` holder masks of epoch ``epoch - 1``; only ``aligned`` needs them.
    if not isinstance(assignment, Assignment):
        raise InvalidParameter.of("assignment", assignment, "an Assignment", "Names are parsed by parse_assignment.")
    n_workers = as_integer("n_workers", n_workers, 1)
    ranks = as_ranks("previous", previous, n_workers)
    masks = None if holders is None else _covering(as_holders(holders, n_workers), ranks)
    if classes is not None:
        check_balance(classes, assignment, len(ranks))
    before = None if assignment.forgets else ranks
    return assignment.draw(Draw(len(ranks), n_workers, seed, epoch, before, masks, classes)).ranks


def check_balance(classes: Classes, assignment: Assignment, n_samples: int | None = None) -> None:
    """Refuse classes that an assignment cannot keep balanced, or that were made for another number of samples."""
    if not assignment.can_balance:
        hint = f"{assignment.name!r} cannot preserve class balance. Use 'global', 'partial:Q' or 'local'."
        raise InvalidParameter.of("balance", classes.name, f"None with the assignment {str(assignment)!r}", hint)
    if n_samples is not None and classes.n_samples not in (None, n_samples):
        raise InvalidParameter.of(
            f"len(balance {classes.name!r})", classes.n_samples, f"{n_samples}, one label per sample"
        )


def _covering(masks: Holders, ranks: Ranks) -> Holders:
    """Return the holders after checking that every worker holds the samples that it trains on now."""
    if len(masks) != len(ranks):
        raise InvalidParameter.of("holders.shape", masks.shape, f"the shape of masks for {len(ranks)} samples")
    lacking = missing_samples(masks, ranks)
    if len(lacking):
        sample = int(lacking[0])
        raise InvalidParameter.of(
            f"holders[{sample}]",
            masks[sample].tolist(),
            f"a mask with worker {ranks[sample]}, which trains on this sample",
            "Every worker must hold its own share.",
        )
    return masks
