"""Expected packets beside those of real plans, over a grid, and beside the reference figures of the papers' authors."""

import itertools

import numpy as np
import pytest

from dshuffle.planning import Choices, get_delivery
from dshuffle.planning.bounds import coded_rate
from dshuffle.planning.cost.job import Work
from dshuffle.planning.packet_counts import survey


def expected(delivery, q, n, alpha, needed, assignment="global", caching="uniform"):
    work = Work(q, 1, Choices(assignment=assignment, caching=caching, cache_fraction=alpha))
    return get_delivery(delivery).expected_packets(work.holder_sets(n, needed))


def real(q, n, alpha, deliveries, assignment="global", caching="uniform", epochs=1):
    choices = Choices(assignment, caching=caching, cache_fraction=alpha)
    figures = survey(q, n, choices, deliveries=deliveries, epochs=epochs, bounds=False)
    return figures[0].needed, {row.name: row.packets for row in figures}


GRID = [(q, n, a) for q in (3000, 30_000) for n in (4, 8, 20, 40) for a in (0.1, 0.2, 0.35, 0.5) if a * n >= 1.2]
FEW = [(q, n, a) for q, n, a in GRID if n <= 20]
# Relative errors that half of the plans, and all, stay within: 'coded' is computed, the others are fitted.
DRAWN = {"coded": (0.01, 0.06), "ubershuffle": (0.05, 0.35), "clique": (0.03, 0.16)}
ALIGNED = {"coded": (0.06, 0.75), "ubershuffle": (0.06, 0.75), "clique": (0.05, 0.20)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("assignment", "caching", "epochs", "grid", "allowed"),
    [("global", "uniform", 1, GRID, DRAWN), ("aligned", "even", 3, FEW, ALIGNED)],
)
def test_expected_packets_beside_real_plans(assignment, caching, epochs, grid, allowed):
    errors = {delivery: [] for delivery in allowed}
    for q, n, alpha in grid:
        needed, packets = real(q, n, alpha, allowed, assignment, caching, epochs)
        for delivery, found in packets.items():
            errors[delivery].append(abs(expected(delivery, q, n, alpha, needed, assignment, caching) / found - 1))
    for delivery, (half, most) in allowed.items():
        assert np.median(errors[delivery]) < half, delivery
        assert max(errors[delivery]) < most, delivery


# Reference figures, n = 20, fresh caches: (q, alpha, uncoded, coded, UberShuffle, our packing).
REFERENCE = [
    (10_000, 0.1, 9012, 6174, 4367, 3911),
    (10_000, 0.3, 6983, 6886, 4558, 1799),
    (10_000, 0.5, 4980, 4971, 4166, 884),
    (100_000, 0.1, 90_001, 46_494, 37_733, 35_516),
    (100_000, 0.2, 79_956, 54_386, 27_206, 21_530),
    (100_000, 0.5, 50_005, 48_842, 21_259, 7088),
    (1_000_000, 0.2, 799_742, 353_898, 218_974, 195_828),
    (1_000_000, 0.5, 499_237, 404_383, 77_989, 60_532),
]


@pytest.mark.parametrize(("q", "alpha", "needed", "coded", "uber", "clique"), REFERENCE)
def test_reference_figures(q, alpha, needed, coded, uber, clique):
    assert expected("coded", q, 20, alpha, needed) == pytest.approx(coded, rel=0.01)
    assert expected("ubershuffle", q, 20, alpha, needed) == pytest.approx(
        uber, rel=0.60 if (q, alpha) == (1_000_000, 0.5) else 0.2
    )
    assert expected("clique", q, 20, alpha, needed) == pytest.approx(clique, rel=0.08)


# Measured uncoded / packets at q = 1e6 where holder sets have become singletons.
@pytest.mark.parametrize(("n", "held", "gain"), [(256, 2, 2.0), (256, 4, 2.2), (256, 8, 2.8)])
def test_gains_of_many_workers(n, held, gain):
    q = 1_000_000
    needed = q * (1 - held / n)
    assert needed / expected("clique", q, n, held / n, needed) == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize("n", [3, 5, 12, 30])
@pytest.mark.parametrize("q", [3000, 60_000])
def test_packets_without_excess(q, n):
    needed, packets = real(q, n, None, ["leftover", "clique", "coded"])
    assert expected("leftover", q, n, None, needed) == pytest.approx(packets["leftover"], rel=0.04)
    assert expected("clique", q, n, None, needed) == pytest.approx(packets["clique"], rel=0.04)
    assert expected("coded", q, n, None, needed) == pytest.approx(packets["coded"], rel=0.04)


@pytest.mark.parametrize("delivery", ["coded", "ubershuffle", "clique"])
@pytest.mark.parametrize(("n", "alpha"), [(6, 0.3), (20, 0.2), (20, 0.5)])
def test_all_come_to_the_bound_in_the_limit(delivery, n, alpha):
    """Chung et al. (2017), Theorem 2: the limit of many samples, which no code beats at any number."""
    rates = [
        expected(delivery, q, n, alpha, q * (1 - alpha)) / coded_rate(q, n, round(alpha * q))
        for q in (10**4, 10**6, 10**9, 10**14)
    ]
    assert min(rates) >= 0.999
    assert all(after <= before + 1e-6 for before, after in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(1, rel=0.02)
