"""Tables of the docs against the code, and their figures against new measurements."""

import re
from pathlib import Path

import numpy as np
import pytest

import dshuffle
from dshuffle.planning import CACHINGS, Aligned, Delivery, next_ranks
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.planning.holders import cache_capacity
from dshuffle.planning.shuffling_error import nguyen_equation_11, shuffling_error

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = Path(dshuffle.__file__).parent
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not here")


def rows_of(page, heading):
    """The cells of the table of a page whose first heading this is."""
    lines = (DOCS / page).read_text().splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def test_the_table_of_deliveries_has_all_members_and_their_users():
    rows = [
        (re.findall(r"`(\w+)`", members), users) for members, _, users in rows_of("design.md", "member of `Delivery`")
    ]
    public = {name for name in {*vars(Delivery), *Delivery.__annotations__} if not name.startswith("_")}
    assert sorted(member for members, _ in rows for member in members) == sorted(public)
    for members, users in rows:
        for user in re.findall(r"`(.+?)`", users):
            path = PACKAGE / user
            sources = "".join(file.read_text() for file in ([path] if path.is_file() else path.glob("*.py")))
            assert any(re.search(rf"\.{member}\b", sources) for member in members), (members, user)


def test_the_table_of_shuffling_errors():
    for q, n, fraction, formula, distance in rows_of("papers.md", "samples"):
        exchange = int(q.replace(",", "")), int(n), float(fraction)
        assert f"{nguyen_equation_11(*exchange):.3f}" == formula
        error = shuffling_error(*exchange)
        assert ("" if error.exact else "at least ") + f"{float(error):.3f}" == distance


def pairs_again(q, n, alpha, epochs):
    """Samples for each worker and set of holders with ``aligned``, and how often two of them are together again."""
    policy = CACHINGS["even"](n, cache_capacity(alpha, q, n), 0)
    ranks = first_ranks("random", q, n, seed=0)
    holders = policy.first(ranks)
    n_groups = pairs = again = 0
    for epoch in range(1, epochs):
        keys = np.column_stack([holders.reshape(q, -1), ranks.astype(np.uint64)])
        groups = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
        ranks = next_ranks(Aligned(), ranks, n, seed=0, epoch=epoch, holders=holders)
        holders = policy.evolve(holders, ranks, epoch)
        before, after = np.bincount(groups), np.bincount(groups * n + ranks)
        n_groups += len(before)
        pairs += int((before * (before - 1)).sum())
        again += int((after * (after - 1)).sum())
    return q * (epochs - 1) / n_groups, again / pairs


@pytest.mark.slow
def test_the_table_of_pairs_with_aligned():
    rows = rows_of("ways-of-shuffling.md", "`cache_fraction`")
    assert len(rows) == 5
    for alpha, samples, size, probability in rows:
        q = int(samples.replace(",", ""))
        measured_size, measured = pairs_again(q, 20, float(alpha), epochs=40 if q < 5000 else 10 if q < 50_000 else 3)
        assert measured_size == pytest.approx(float(size), rel=0.05)
        assert measured == pytest.approx(float(probability), abs=0.0012)
