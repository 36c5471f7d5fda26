"""Kernels are compiled ahead for every choice that a session accepts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dshuffle.compare import compile_kernels
from dshuffle.compare.kernel_cache import _few
from dshuffle.errors import InvalidParameter
from dshuffle.exchange.transports import like
from dshuffle.planning import AUTO, DELIVERIES, Aligned, Choices, Chunks, Global, Local, Partial, ShuffleSpec
from dshuffle.rows import RowLayout

ASSIGNMENTS = [Local(), Partial(0.1), Partial(0.01), Global(), Aligned(), Chunks(), Chunks(250)]


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize("n_workers", [2, 5])
def test_what_a_session_accepts_can_be_compiled_ahead(assignment, n_workers):
    """The few samples of four workers are accepted, too."""
    accepted = 0
    for delivery, caching, fraction in itertools.product(
        [*DELIVERIES, AUTO], [None, "uniform", "recent", "even"], [None, 1 / n_workers, 0.75, 1.0]
    ):
        known = Chunks(100) if assignment == Chunks() else assignment
        try:
            choices = Choices(assignment, delivery, caching, fraction)
            ShuffleSpec(
                10_000,
                n_workers,
                Choices(known, "peer" if delivery == AUTO else delivery, caching, fraction),
            )
        except InvalidParameter:
            continue
        accepted += 1
        ShuffleSpec(64, 4, _few(choices))
    assert accepted


def test_only_the_kernels_of_these_rows_are_compiled(monkeypatch):
    warmed = []
    monkeypatch.setattr("dshuffle.compare.kernel_cache.warm_up", lambda n, coded=False: warmed.append((n, coded)))
    layout = RowLayout.of({"x": (np.dtype("f4"), (3,))})
    compile_kernels([Choices(Global(), "clique", None, 0.5), Choices(Partial(0.1))], layout)
    assert [nbytes for nbytes, coded in warmed if coded] == [12]
    assert {nbytes for nbytes, coded in warmed if not coded} == {8, 12}


def test_the_kernels_of_a_run_are_all_compiled_ahead(monkeypatch):
    """Integer targets are cast to float64; each length of a row is coded in its widest words."""
    used = []
    monkeypatch.setattr(
        "dshuffle.compare.kernel_cache.sgd_pass", lambda *given: used.append((given[1].dtype.str, given[3].dtype.str))
    )
    compile_kernels([Choices()], RowLayout.of({"x": (np.dtype("f4"), (3,)), "y": (np.dtype("i8"), ())}))
    assert set(used) == {("<f4", "<f4"), ("<f4", "<f8")}
    assert [like(nbytes) for nbytes in (800, 404, 6, 7)] == [8, 12, 9, 9]
