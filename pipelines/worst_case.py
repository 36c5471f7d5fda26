"""Compare the packets of `leftover` with their bounds, for 2 to 20 workers without excess caches.

    python pipelines/worst_case.py [--samples-per-worker 380] [--shuffles 20]

The script prints one row for each number of workers: the packets on the worst-case shuffle (equation 49) with the rate
of the worst case (Theorem 3), and the mean packets on random shuffles with the rate of Theorem 1 and the lower bound of
Theorem 2. `clique` is shown for comparison. "exact" counts the random shuffles whose plan has exactly the packets of
Theorem 1.

References
----------
Attia and Tandon (2016); see docs/papers.md.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from studies.bounds import lower_bound, shuffle_matrix
from studies.scripts import at_least

from dshuffle.planning import first_ranks, holders_of
from dshuffle.planning.delivery import PlanInput, get_delivery

Numbers = NDArray[np.integer]


def worst_case_shuffle(n_samples: int, n_workers: int) -> tuple[Numbers, Numbers]:
    """``(owners, destinations)`` of the shuffle in which every worker passes its whole share to the next (equation 49).

    The equation omits that the last share goes to the first worker, which follows because shares keep their sizes.
    """
    owners = np.repeat(np.arange(n_workers, dtype=np.int32), n_samples // n_workers)
    return owners, (owners + np.int32(1)) % np.int32(n_workers)


def leftover_rate(matrix: Numbers) -> int:
    """Packets of ``leftover`` for a shuffle matrix that keeps the size of every share (Theorem 1, equation 20).

    Pairs of workers exchange as many packets as the larger of both directions. Then the one worker whose leftover
    samples are the most is ignored, as it decodes them from the packets of the others.
    """
    leftovers = np.maximum(matrix - matrix.T, 0)
    return int(np.triu(np.maximum(matrix, matrix.T), k=1).sum() - leftovers.sum(axis=1).max())


def leftover_lower_bound(matrix: Numbers) -> int:
    """Least packets of any code for a shuffle matrix of at most 20 workers (Theorem 2, equation 21)."""
    owners, destinations = np.divmod(np.repeat(np.arange(matrix.size), matrix.ravel()), len(matrix))
    return lower_bound(np.uint64(1) << owners.astype(np.uint64), destinations, len(matrix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples-per-worker", type=at_least(1), default=380)
    parser.add_argument("--shuffles", type=at_least(1), default=20)
    options = parser.parse_args()
    headings = ("workers", "worst case", "its rate", "random", "Thm 1", "exact", "bound", "clique", "uncoded")
    table = Table(*headings, box=box.SIMPLE_HEAD)
    for n in track(range(2, 21), "planning"):
        q = n * options.samples_per_worker
        owners, destinations = worst_case_shuffle(q, n)
        worst_input = PlanInput(holders_of(owners, n), destinations.astype(np.int32), n, 0)
        worst = get_delivery("leftover").plan(worst_input).n_packets
        packets, rates, bounds, cliques, needed = [], [], [], [], []
        for seed in range(options.shuffles):
            owners = first_ranks("random", q, n, seed=2 * seed)
            destinations = first_ranks("random", q, n, seed=2 * seed + 1)
            holders = holders_of(owners, n)
            matrix = shuffle_matrix(owners, destinations, n)
            plan_input = PlanInput(holders, destinations, n, 0)
            packets.append(get_delivery("leftover").plan(plan_input).n_packets)
            cliques.append(get_delivery("clique").plan(plan_input).n_packets)
            rates.append(leftover_rate(matrix))
            bounds.append(leftover_lower_bound(matrix))
            needed.append(int((owners != destinations).sum()))
        exact = sum(made == rate for made, rate in zip(packets, rates, strict=True))
        means = [statistics.fmean(values) for values in (packets, rates, bounds, cliques, needed)]
        table.add_row(
            str(n),
            f"{worst:,}",
            f"{q * (n - 1) // n:,}",
            f"{means[0]:,.0f}",
            f"{means[1]:,.0f}",
            f"{exact}/{options.shuffles}",
            f"{means[2]:,.0f}",
            f"{means[3]:,.0f}",
            f"{means[4]:,.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
