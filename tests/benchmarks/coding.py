"""How fast packets are encoded and decoded on one core, against the same in NumPy.

    python tests/benchmarks/coding.py [--row-bytes 800] [--components 4] [--mib 128] [--repeats 5]

Prints GB/s of rows and packets read. `batched` is NumPy at its best: it takes rows of some packets at a time, as many
as fit the cache, and XORs them in place, one component after the other; the best of several block sizes counts.
`one by one` is NumPy a packet at a time. All of them treat the checksums as well (NumPy has none of its own, so it is
lent ours for decoding), and their results are compared. Rows stand in random order in more memory than a cache has.
CPU seconds count, so that other processes disturb less; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dshuffle.coding import decode, encode
from dshuffle.rows import checksum_rows

ROW_BYTES = [64, 400, 800, 803, 1024, 8000, 80000]
BLOCKS = [2**16, 2**18, 2**19, 2**20]
FEW = 2000
"""Packets that are enough to tell how long one takes."""


class Case:
    """Rows, packets of so many of them, and the sample that is to be decoded from each."""

    def __init__(self, nbytes: int, components: int, mib: int) -> None:
        rng = np.random.default_rng(0)
        self.n_packets = max(1, mib * 2**20 // (nbytes * components))
        n_rows = self.n_packets * components
        self.rows = rng.integers(0, 256, (n_rows, nbytes), dtype=np.uint8)
        self.checksums = checksum_rows(self.rows, np.arange(n_rows))
        self.slots = rng.permutation(n_rows).reshape(self.n_packets, components)
        self.nbytes_read = self.rows.nbytes
        # The last row of each packet is the one that its destination lacks: it goes where its copy stood.
        self.known, self.targets = self.slots[:, :-1].copy(), self.slots[:, -1].copy()
        self.packets, self.sums = self.room()
        self.encode_ours(self.packets, self.sums)

    def room(self) -> tuple[np.ndarray, np.ndarray]:
        """Room for all packets, the pages of which are there."""
        return np.zeros((self.n_packets, self.rows.shape[1]), np.uint8), np.zeros(self.n_packets, np.uint32)

    # -- encoding ----------------------------------------------------------------------------------------------

    def encode_ours(self, out: np.ndarray, sums: np.ndarray) -> None:
        offsets = np.arange(self.n_packets + 1) * self.slots.shape[1]
        encode(self.rows, self.checksums, offsets, self.slots.ravel(), np.arange(self.n_packets), out, sums)

    def encode_batched(self, out: np.ndarray, sums: np.ndarray, step: int) -> None:
        taken = np.empty((step, self.rows.shape[1]), np.uint8)
        for first in range(0, self.n_packets, step):
            slots = self.slots[first : first + step]
            self.xor_taken(slots[:, 1:], out[first : first + step], taken, begin=slots[:, 0])
            np.bitwise_xor.reduce(self.checksums[slots], axis=1, out=sums[first : first + step])

    def encode_one_by_one(self, out: np.ndarray, sums: np.ndarray, count: int) -> None:
        for packet in range(count):
            slots = self.slots[packet]
            np.bitwise_xor.reduce(self.rows[slots], axis=0, out=out[packet])
            sums[packet] = np.bitwise_xor.reduce(self.checksums[slots])

    def xor_taken(
        self, slots: np.ndarray, out: np.ndarray, taken: np.ndarray, *, begin: np.ndarray | None = None
    ) -> None:
        """XOR rows into ``out``, one of each packet at a time."""
        if begin is not None:
            np.take(self.rows, begin, axis=0, out=out, mode="clip")
        taken = taken[: len(out)]
        for column in slots.T:
            np.take(self.rows, column, axis=0, out=taken, mode="clip")
            np.bitwise_xor(_wide(out), _wide(taken), out=_wide(out))

    # -- decoding ----------------------------------------------------------------------------------------------

    def decode_ours(self) -> None:
        offsets = np.arange(self.n_packets + 1) * self.known.shape[1]
        known, targets = self.known.ravel(), self.targets
        wrong = decode(self.rows, self.checksums, self.packets, self.sums, offsets, known, targets, targets)
        assert wrong == -1

    def decode_batched(self, step: int) -> None:
        taken, left = np.empty((2, step, self.rows.shape[1]), np.uint8)
        for first in range(0, self.n_packets, step):
            block = slice(first, first + step)
            packets, known, targets = self.packets[block], self.known[block], self.targets[block]
            row = left[: len(packets)]
            np.copyto(row, packets)
            self.xor_taken(known, row, taken)
            sums = self.sums[block] ^ np.bitwise_xor.reduce(self.checksums[known], axis=1)
            assert (checksum_rows(row, targets) == sums).all()
            self.rows[targets], self.checksums[targets] = row, sums

    def decode_one_by_one(self, count: int) -> None:
        for packet in range(count):
            known, target = self.known[packet], self.targets[packet]
            row = self.packets[packet] ^ np.bitwise_xor.reduce(self.rows[known], axis=0)
            total = self.sums[packet] ^ np.bitwise_xor.reduce(self.checksums[known])
            assert checksum_rows(row[np.newaxis], np.array([target]))[0] == total
            self.rows[target], self.checksums[target] = row, total


def _wide(rows: np.ndarray) -> np.ndarray:
    """In words where that is possible."""
    return rows.view(np.uint64) if rows.shape[1] % 8 == 0 else rows


def _compare(case: Case, ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, Any]:
    """GB/s of each way, which returns the part of the work that it does; CPU seconds, in turns, the best counts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            started = time.thread_time()
            part = run()
            seconds[name].append((time.thread_time() - started) / part)
    speed = {name: case.nbytes_read / min(each) / 1e9 for name, each in seconds.items()}
    batched = {name: each for name, each in speed.items() if name.startswith("batched")}
    return {
        "ours": speed["ours"],
        "batched": max(batched.values()),
        "block": max(batched, key=batched.__getitem__).removeprefix("batched "),
        "one by one": speed["one by one"],
        "ratio": speed["ours"] / max(batched.values()),
    }


def measure(nbytes: int, components: int, mib: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Speeds of encoding and of decoding rows of this size."""
    case = Case(nbytes, components, mib)
    out, sums = case.room()
    steps = {f"batched {block // 1024} KiB": max(1, block // nbytes) for block in BLOCKS}
    few = min(FEW, case.n_packets)
    truth = case.rows.copy(), case.checksums.copy()

    def whole(run: Callable[..., None], *args: Any) -> Callable[[], float]:
        def timed() -> float:
            run(*args)
            return 1.0

        return timed

    def part(run: Callable[..., None], *args: Any) -> Callable[[], float]:
        def timed() -> float:
            run(*args, few)
            return few / case.n_packets

        return timed

    encoding = {
        "ours": whole(case.encode_ours, out, sums),
        "one by one": part(case.encode_one_by_one, out, sums),
        **{name: whole(case.encode_batched, out, sums, step) for name, step in steps.items()},
    }
    results = {"encode": _compare(case, encoding, repeats)}
    for run in encoding.values():
        out[:], sums[:] = 0, 0
        done = round(run() * case.n_packets)
        assert (out[:done] == case.packets[:done]).all()
        assert (sums[:done] == case.sums[:done]).all()

    decoding = {
        "ours": whole(case.decode_ours),
        "one by one": part(case.decode_one_by_one),
        **{name: whole(case.decode_batched, step) for name, step in steps.items()},
    }
    results["decode"] = _compare(case, decoding, repeats)
    for run in decoding.values():
        case.rows[case.targets], case.checksums[case.targets] = 0, 0
        done = case.targets[: round(run() * case.n_packets)]
        assert (case.rows[done] == truth[0][done]).all()
        assert (case.checksums[done] == truth[1][done]).all()
    return results


def main(argv: list[str] | None = None) -> dict[int, dict[str, dict[str, Any]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, action="append", help="again for several")
    parser.add_argument("--components", type=int, default=4)
    parser.add_argument("--mib", type=int, default=128, help="rows in all")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    results = {}
    print("GB/s           row      ours   batched (block)      one by one   ours / batched")
    for nbytes in options.row_bytes or ROW_BYTES:
        results[nbytes] = measure(nbytes, options.components, options.mib, options.repeats)
        for name, speeds in results[nbytes].items():
            print(
                f"{name:8s} {nbytes:9d} {speeds['ours']:9.2f} {speeds['batched']:9.2f} ({speeds['block']:>8s}) "
                f"{speeds['one by one']:12.3f} {speeds['ratio']:12.2f}"
            )
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
