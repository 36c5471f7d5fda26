"""How fast packets are encoded and decoded on one core, against the same in NumPy.

    python tests/benchmarks/coding.py [--row-bytes 800] [--components 4] [--mib 256] [--repeats 9]

Prints GB/s of rows and packets read. Four ways do the same work:

- `ours`: the kernels of ``dshuffle.coding``.
- `plain`: NumPy as it is first written, a message at a time: ``np.bitwise_xor.reduce(rows[slots], axis=1)``.
- `batched`: NumPy as somebody would write it who knows it well. It treats a block of packets at a time, in one of two
  ways: `takes` copies the first row of every packet to where the packet goes, and then one component after the other
  to a buffer, from which it is XORed in place; `reduce` copies all rows of the packets to a buffer and reduces that.
  Nothing is allocated, words are of 8 bytes, and the best of both ways and of several block sizes counts, for each row
  size by itself. All packets have as many components here, which NumPy needs and a plan does not keep to.
- `one by one`: NumPy a packet at a time.

All of them XOR the checksums as well, and in decoding verify each row before it is put where it belongs; NumPy has no
checksum of the kind, so it is lent ours, a whole block at a time. Their results are compared.

Rows stand in random order in more memory than caches have, as a plan finds them in the store and in a worker's cache,
and are read once. Packets are encoded message by message into the same room, and decoded from where they lie into
random rows. CPU seconds count, and the ways take turns, so that other processes disturb less; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dshuffle.coding import decode, encode
from dshuffle.rows import checksum_rows

ROW_BYTES = [16, 64, 100, 128, 256, 400, 800, 803, 1024, 4096, 8000, 80000]
BLOCKS = [2**16, 2**18, 2**19, 2**20]
"""Bytes that a block's rows of one component have."""
MESSAGE = 8 * 2**20
"""Bytes of packets that are encoded at a time: a message of the exchange."""
APART = ["ours", "plain", "one by one"]
"""Ways that are not among those of which the best counts."""
FEW = 2000
"""Packets that are enough to tell how long one takes."""

Xor = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def xor_takes(rows: np.ndarray, slots: np.ndarray, out: np.ndarray, room: np.ndarray) -> None:
    """XOR ``rows[slots]`` into ``out``, one component after the other."""
    taken = room[: len(out)]
    np.take(rows, slots[:, 0], axis=0, out=out, mode="clip")
    for column in slots.T[1:]:
        np.take(rows, column, axis=0, out=taken, mode="clip")
        np.bitwise_xor(out, taken, out=out)


def xor_reduce(rows: np.ndarray, slots: np.ndarray, out: np.ndarray, room: np.ndarray) -> None:
    """XOR ``rows[slots]`` into ``out``, all components at once."""
    taken = room[: slots.size].reshape(*slots.shape, -1)
    np.take(rows, slots, axis=0, out=taken, mode="clip")
    np.bitwise_xor.reduce(taken, axis=1, out=out)


def xor_checksums(checksums: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """XOR of the rows' checksums; by columns, which is faster than to reduce short lists."""
    total = checksums[slots[:, 0]]
    for column in slots.T[1:]:
        total ^= checksums[column]
    return total


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
        self.packets, self.sums = self.room(self.n_packets)
        self.encode_ours(self.packets, self.sums)

    def room(self, n_packets: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for packets, the pages of which are there."""
        nbytes = self.rows.shape[1]
        out, sums = np.empty((n_packets, nbytes), np.uint8), np.empty(n_packets, np.uint32)
        out[:], sums[:] = 1, 1
        return out, sums

    def message(self) -> tuple[np.ndarray, np.ndarray]:
        """Room for the packets of a message."""
        return self.room(min(self.n_packets, max(1, MESSAGE // self.rows.shape[1])))

    def buffer(self, step: int) -> np.ndarray:
        """Room for all rows of ``step`` packets."""
        return _wide(self.room(step * self.slots.shape[1])[0])

    def blocks(self, room: int, step: int) -> Iterator[tuple[slice, slice]]:
        """So many packets at a time, and their places in room for some, which is filled again and again."""
        for begin in range(0, self.n_packets, room):
            for first in range(begin, min(begin + room, self.n_packets), step):
                last = min(first + step, begin + room, self.n_packets)
                yield slice(first, last), slice(first - begin, last - begin)

    # -- encoding ----------------------------------------------------------------------------------------------

    def encode_ours(self, out: np.ndarray, sums: np.ndarray) -> None:
        offsets, slots = np.arange(self.n_packets + 1) * self.slots.shape[1], self.slots.ravel()
        packets = np.arange(self.n_packets)
        for block, place in self.blocks(len(out), len(out)):
            encode(self.rows, self.checksums, offsets, slots, packets[block], out[place], sums[place])

    def encode_plain(self, out: np.ndarray, sums: np.ndarray) -> None:
        for block, place in self.blocks(len(out), len(out)):
            slots = self.slots[block]
            _wide(out[place])[:] = np.bitwise_xor.reduce(_wide(self.rows)[slots], axis=1)
            sums[place] = np.bitwise_xor.reduce(self.checksums[slots], axis=1)

    def encode_batched(self, out: np.ndarray, sums: np.ndarray, xor: Xor, step: int) -> None:
        buffer = self.buffer(step)
        for block, place in self.blocks(len(out), step):
            slots = self.slots[block]
            xor(_wide(self.rows), slots, _wide(out[place]), buffer)
            sums[place] = xor_checksums(self.checksums, slots)

    def encode_one_by_one(self, out: np.ndarray, sums: np.ndarray, count: int) -> None:
        for packet in range(count):
            slots, place = self.slots[packet], packet % len(out)
            np.bitwise_xor.reduce(self.rows[slots], axis=0, out=out[place])
            sums[place] = np.bitwise_xor.reduce(self.checksums[slots])

    # -- decoding ----------------------------------------------------------------------------------------------

    def decode_ours(self) -> None:
        offsets = np.arange(self.n_packets + 1) * self.known.shape[1]
        known, targets = self.known.ravel(), self.targets
        wrong = decode(self.rows, self.checksums, self.packets, self.sums, offsets, known, targets, targets)
        assert wrong == -1

    def decode_plain(self) -> None:
        step, rows = max(1, MESSAGE // self.rows.shape[1]), _wide(self.rows)
        for block, _ in self.blocks(self.n_packets, step):
            known, targets = self.known[block], self.targets[block]
            row = _wide(self.packets[block]) ^ np.bitwise_xor.reduce(rows[known], axis=1)
            sums = self.sums[block] ^ np.bitwise_xor.reduce(self.checksums[known], axis=1)
            assert (checksum_rows(row.view(np.uint8), targets) == sums).all()
            rows[targets], self.checksums[targets] = row, sums

    def decode_batched(self, xor: Xor, step: int) -> None:
        buffer, left = self.buffer(step), self.buffer(step)
        rows = _wide(self.rows)
        for block, _ in self.blocks(self.n_packets, step):
            known, targets = self.known[block], self.targets[block]
            row = left[: len(known)]
            xor(rows, known, row, buffer)
            np.bitwise_xor(row, _wide(self.packets[block]), out=row)
            sums = self.sums[block] ^ xor_checksums(self.checksums, known)
            assert (checksum_rows(row.view(np.uint8), targets) == sums).all()
            rows[targets], self.checksums[targets] = row, sums

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

    def seconds(names: list[str], turns: int) -> dict[str, float]:
        best = dict.fromkeys(names, float("inf"))
        for name in names * turns:
            started = time.thread_time()
            part = ways[name]()
            best[name] = min(best[name], (time.thread_time() - started) / part)
        return best

    # The best of NumPy's ways is found first and then measured as often as ours: the best of many would be favoured.
    trial = seconds([name for name in ways if name not in APART], 2)
    way = min(trial, key=trial.__getitem__)
    speed = {name: case.nbytes_read / each / 1e9 for name, each in seconds([*APART, way], repeats).items()}
    return {
        "ours": speed["ours"],
        "batched": speed[way],
        "way": way,
        "plain": speed["plain"],
        "one by one": speed["one by one"],
        "ratio": speed["ours"] / speed[way],
    }


def _whole(run: Callable[..., None], *args: Any) -> Callable[[], float]:
    """A way that does all of the work."""

    def way() -> float:
        run(*args)
        return 1.0

    return way


def _part(run: Callable[..., None], count: int, of: int, *args: Any) -> Callable[[], float]:
    """A way that does the first packets."""

    def way() -> float:
        run(*args, count)
        return count / of

    return way


def measure(nbytes: int, components: int, mib: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Speeds of encoding and of decoding rows of this size."""
    case = Case(nbytes, components, mib)
    few = min(FEW, case.n_packets)
    batches = {
        f"{xor.__name__.removeprefix('xor_')} {block // 1024} KiB": (xor, max(1, block // nbytes))
        for xor in (xor_takes, xor_reduce)
        for block in BLOCKS
    }

    def encoding(out: np.ndarray, sums: np.ndarray) -> dict[str, Callable[[], float]]:
        return {
            "ours": _whole(case.encode_ours, out, sums),
            "plain": _whole(case.encode_plain, out, sums),
            "one by one": _part(case.encode_one_by_one, few, case.n_packets, out, sums),
            **{name: _whole(case.encode_batched, out, sums, *batch) for name, batch in batches.items()},
        }

    results = {"encode": _compare(case, encoding(*case.message()), repeats)}
    out, sums = case.room(case.n_packets)
    for run in encoding(out, sums).values():
        out[:], sums[:] = 0, 0
        done = round(run() * case.n_packets)
        assert (out[:done] == case.packets[:done]).all()
        assert (sums[:done] == case.sums[:done]).all()

    truth = case.rows.copy(), case.checksums.copy()
    decoding = {
        "ours": _whole(case.decode_ours),
        "plain": _whole(case.decode_plain),
        "one by one": _part(case.decode_one_by_one, few, case.n_packets),
        **{name: _whole(case.decode_batched, *batch) for name, batch in batches.items()},
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
    parser.add_argument("--mib", type=int, default=256, help="rows in all")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    results = {}
    print(
        "GB/s           row      ours     plain   batched (best way      )  one by one  ours / plain, batched",
        flush=True,
    )
    for nbytes in options.row_bytes or ROW_BYTES:
        results[nbytes] = measure(nbytes, options.components, options.mib, options.repeats)
        for name, speeds in results[nbytes].items():
            print(
                f"{name:8s} {nbytes:9d} {speeds['ours']:9.2f} {speeds['plain']:9.2f} {speeds['batched']:9.2f} "
                f"({speeds['way']:>15s}) {speeds['one by one']:11.3f} {speeds['ours'] / speeds['plain']:8.2f} "
                f"{speeds['ratio']:7.2f}",
                flush=True,
            )
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
