"""Bundles: rows reach their destinations through forwarders, whatever their number and length."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange.bundles import BundledRows, Bundles, ForwardedRows, forwarded
from dshuffle.exchange.messages import flows_of_samples
from dshuffle.planning.delivery.grid import WorkerGrid
from dshuffle.planning.epoch_plan import forwarder_of
from dshuffle.rows import RowLayout


class Numbered:
    """A holder whose row of a sample is made of its number."""

    def pack(self, sample_ids, rows, checksums):
        rows[:] = (sample_ids[:, None] % 251).astype(np.uint8)
        checksums[:] = sample_ids


def layout_of(row_nbytes):
    return RowLayout.of({"x": (np.dtype(np.uint8), (row_nbytes,))})


def bundle_of(grid, sender, forwarder, sends, layout):
    """The message of a sender to a forwarder."""
    bundles = Bundles.of(sends, grid, sender, layout.nbytes)
    first, last = bundles.flows[forwarder_of(forwarder)].message(0)
    rows, checksums = layout.empty(last - first), np.empty(last - first, np.uint32)
    BundledRows(Numbered(), bundles).pack(first, last, rows, checksums)
    return rows, checksums


@given(data=st.data(), n_workers=st.integers(1, 14), row_nbytes=st.sampled_from([1, 5, 8, 64]))
def test_every_row_arrives_once(data, n_workers, row_nbytes):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    most, at_most = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 9))
    grid, layout = WorkerGrid(n_workers), layout_of(row_nbytes)
    counts = rng.integers(0, most + 1, (n_workers, n_workers)) * (rng.random((n_workers, n_workers)) < 0.7)
    np.fill_diagonal(counts, 0)
    ids = iter(np.split(rng.permutation(counts.sum()), counts.ravel().cumsum()[:-1]))
    moves = {(s, d): next(ids) for s in range(n_workers) for d in range(n_workers)}
    sends = {s: {d: moves[s, d] for d in range(n_workers) if len(moves[s, d])} for s in range(n_workers)}

    forwarders = {}
    for rank in range(n_workers):
        rows = ForwardedRows(grid, rank, layout)
        for sender, flow in rows.incoming.items():
            rows.unpack(*flow.message(0), *bundle_of(grid, sender, rank, sends[sender], layout))
        forwarders[forwarder_of(rank)] = rows, rows.outgoing(at_most=at_most)

    for rank in range(n_workers):
        receives = {s: moves[s, rank] for s in range(n_workers) if len(moves[s, rank])}
        samples, flows = flows_of_samples(forwarded(receives, grid, rank), at_most=at_most)
        assert sorted(samples) == sorted(np.concatenate([[], *receives.values()]))
        for forwarder, flow in flows.items():
            source, outgoing = forwarders[forwarder]
            assert outgoing[rank].n_messages == flow.n_messages
            for sequence in range(flow.n_messages):
                (first, last), expected = outgoing[rank].message(sequence), samples[slice(*flow.message(sequence))]
                got, checksums = layout.empty(last - first), np.empty(last - first, np.uint32)
                source.pack(first, last, got, checksums)
                assert np.array_equal(checksums, expected)
                assert np.array_equal(got, np.repeat((expected % 251)[:, None], row_nbytes, axis=1))
        for forwarder, (_, outgoing) in forwarders.items():
            assert (rank in outgoing) == (forwarder in flows)


def test_bundles_that_are_not_what_they_say():
    grid, layout = WorkerGrid(4), layout_of(16)
    rows, checksums = bundle_of(grid, 0, 1, {1: np.arange(3), 3: np.arange(5)}, layout)
    assert len(rows) == 1 + 3 + 5
    kept = ForwardedRows(grid, 1, layout)
    [first, last] = kept.incoming[0].message(0)
    wrong = rows.copy()
    wrong[0, 3] ^= 1
    with pytest.raises(ChecksumMismatch, match="header of a bundle"):
        kept.unpack(first, last, wrong, checksums)
    with pytest.raises(ExchangeError, match="has 7 rows, but its header says 8"):
        kept.unpack(first, last, rows[:-1], checksums[:-1])
    with pytest.raises(ExchangeError, match=r"rows \(9, 15\)"):
        kept.unpack(first, last, rows[:, :15].copy(), checksums)
    with pytest.raises(ExchangeError, match=r"rows \(0, 16\)"):
        kept.unpack(first, last, rows[:0], checksums[:0])
    with pytest.raises(ExchangeError, match="cannot be read from the store"):
        asyncio.run(kept.load(first, last, lambda: False, recovers=True))
