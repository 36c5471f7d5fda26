"""How fast packets are encoded and decoded on one core, against NumPy: GB/s of rows and packets read.

    python tests/benchmarks/coding.py [--row-bytes 800] [--components 4] [--mib 256] [--repeats 9]

`ours` are the kernels of ``dshuffle.coding``, and `NumPy` does the same a message at a time:
``np.bitwise_xor.reduce(rows[slots], axis=1)``. Both XOR the checksums as well, and in decoding verify each row before
it is put where it belongs; NumPy is lent our checksum. Their results are compared.

Rows stand in random order in more memory than caches have, and are read once. Packets are encoded message by message
into the same room, and decoded from where they lie into random rows. CPU seconds count, and both take turns, so that
other processes disturb less; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import numpy as np

from dshuffle.coding import decode, encode
from dshuffle.rows import checksum_rows

ROW_BYTES = [16, 64, 100, 128, 256, 400, 800, 803, 1024, 4096, 8000, 80000]
MESSAGE = 8 * 2**20
"""Bytes of packets that are encoded at a time: a message of the exchange."""


class Case:
    """Rows, packets of so many of them, and the sample that is to be decoded from each."""

    def __init__(self, nbytes: int, components: int, mib: int) -> None:
        rng = np.random.default_rng(0)
        self.n_packets = max(1, mib * 2**20 // (nbytes * components))
        n_rows = self.n_packets * components
        self.rows = rng.integers(0, 256, (n_rows, nbytes), dtype=np.uint8)
        self.checksums = checksum_rows(self.rows, np.arange(n_rows))
        self.slots = rng.permutation(n_rows).reshape(self.n_packets, components)
        # The last row of each packet is the one that its destination lacks: it goes where its copy stood.
        self.known, self.targets = self.slots[:, :-1].copy(), self.slots[:, -1].copy()
        self.packets, self.sums = self.room(self.n_packets)
        self.encode_ours(self.packets, self.sums)

    def room(self, n_packets: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for packets, the pages of which are there."""
        return np.ones((n_packets, self.rows.shape[1]), np.uint8), np.ones(n_packets, np.uint32)

    def blocks(self, step: int) -> Iterator[tuple[slice, slice]]:
        """So many packets at a time, and their places in room for as many."""
        for first in range(0, self.n_packets, step):
            last = min(first + step, self.n_packets)
            yield slice(first, last), slice(0, last - first)

    def encode_ours(self, out: np.ndarray, sums: np.ndarray) -> None:
        offsets, slots = np.arange(self.n_packets + 1) * self.slots.shape[1], self.slots.ravel()
        packets = np.arange(self.n_packets)
        for block, place in self.blocks(len(out)):
            encode(self.rows, self.checksums, offsets, slots, packets[block], out[place], sums[place])

    def encode_numpy(self, out: np.ndarray, sums: np.ndarray) -> None:
        for block, place in self.blocks(len(out)):
            slots = self.slots[block]
            _wide(out[place])[:] = np.bitwise_xor.reduce(_wide(self.rows)[slots], axis=1)
            sums[place] = np.bitwise_xor.reduce(self.checksums[slots], axis=1)

    def decode_ours(self) -> None:
        offsets = np.arange(self.n_packets + 1) * self.known.shape[1]
        known, targets = self.known.ravel(), self.targets
        wrong = decode(self.rows, self.checksums, self.packets, self.sums, offsets, known, targets, targets)
        assert wrong == -1

    def decode_numpy(self) -> None:
        rows = _wide(self.rows)
        for block, _ in self.blocks(max(1, MESSAGE // self.rows.shape[1])):
            known, targets = self.known[block], self.targets[block]
            row = _wide(self.packets[block]) ^ np.bitwise_xor.reduce(rows[known], axis=1)
            sums = self.sums[block] ^ np.bitwise_xor.reduce(self.checksums[known], axis=1)
            assert (checksum_rows(row.view(np.uint8), targets) == sums).all()
            rows[targets], self.checksums[targets] = row, sums


def _wide(rows: np.ndarray) -> np.ndarray:
    """In words where that is possible."""
    return rows.view(np.uint64) if rows.shape[1] % 8 == 0 else rows


def speeds(case: Case, ways: list[Callable[[], None]], repeats: int) -> list[float]:
    """GB/s of each way: CPU seconds, in turns, the best counts."""
    best = [float("inf")] * len(ways)
    for turn in range(repeats * len(ways)):
        started = time.thread_time()
        ways[turn % len(ways)]()
        best[turn % len(ways)] = min(best[turn % len(ways)], time.thread_time() - started)
    return [case.rows.nbytes / seconds / 1e9 for seconds in best]


def measure(nbytes: int, components: int, mib: int, repeats: int) -> dict[str, list[float]]:
    """Speeds of encoding and of decoding rows of this size, ours and NumPy's."""
    case = Case(nbytes, components, mib)
    out, sums = case.room(min(case.n_packets, max(1, MESSAGE // nbytes)))
    encoding = [lambda: case.encode_ours(out, sums), lambda: case.encode_numpy(out, sums)]
    results = {"encode": speeds(case, encoding, repeats)}
    whole, whole_sums = case.room(case.n_packets)
    case.encode_numpy(whole, whole_sums)
    assert (whole == case.packets).all()
    assert (whole_sums == case.sums).all()
    truth = case.rows.copy(), case.checksums.copy()
    results["decode"] = speeds(case, [case.decode_ours, case.decode_numpy], repeats)
    for run in (case.decode_ours, case.decode_numpy):
        case.rows[case.targets], case.checksums[case.targets] = 0, 0
        run()
        assert (case.rows == truth[0]).all()
        assert (case.checksums == truth[1]).all()
    return results


def main(argv: list[str] | None = None) -> dict[int, dict[str, list[float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, action="append", help="again for several")
    parser.add_argument("--components", type=int, default=4)
    parser.add_argument("--mib", type=int, default=256, help="rows in all")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    results = {}
    print("GB/s           row      ours     NumPy  ours / NumPy", flush=True)
    for nbytes in options.row_bytes or ROW_BYTES:
        results[nbytes] = measure(nbytes, options.components, options.mib, options.repeats)
        for name, (ours, plain) in results[nbytes].items():
            print(f"{name:8s} {nbytes:9d} {ours:9.2f} {plain:9.2f} {ours / plain:13.2f}", flush=True)
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
