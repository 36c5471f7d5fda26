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

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dshuffle.planning import first_ranks, holders_of
from dshuffle.planning.bounds import leftover_lower_bound, leftover_rate, worst_case_rate, worst_case_shuffle
from dshuffle.planning.delivery import plan_delivery, shuffle_matrix
from dshuffle.units import at_least


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
        worst = plan_delivery("leftover", holders_of(owners, n), destinations, n).n_packets
        packets, rates, bounds, cliques, needed = [], [], [], [], []
        for seed in range(options.shuffles):
            owners = first_ranks("random", q, n, seed=2 * seed)
            destinations = first_ranks("random", q, n, seed=2 * seed + 1)
            holders = holders_of(owners, n)
            matrix = shuffle_matrix(owners, destinations, n)
            packets.append(plan_delivery("leftover", holders, destinations, n).n_packets)
            cliques.append(plan_delivery("clique", holders, destinations, n).n_packets)
            rates.append(leftover_rate(matrix))
            bounds.append(leftover_lower_bound(matrix))
            needed.append(int((owners != destinations).sum()))
        exact = sum(made == rate for made, rate in zip(packets, rates, strict=True))
        means = [statistics.fmean(values) for values in (packets, rates, bounds, cliques, needed)]
        table.add_row(
            str(n),
            f"{worst:,}",
            f"{worst_case_rate(q, n):,.0f}",
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
