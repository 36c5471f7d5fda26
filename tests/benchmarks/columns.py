"""A table of many columns beside one matrix of the same bytes: to create, to open and to read in random order.

    python tests/benchmarks/columns.py

The two take turns, in local files that are in the page cache, and the best of each counts: read the ratios. ``read``
puts all rows into random places of a packed matrix, as a worker does. ``some`` reads a hundredth of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dshuffle.store import create_dataset, open_dataset

STEPS = ("create", "open", "read", "some")


def seconds(path: Path, data: Any, expected: np.ndarray) -> dict[str, float]:
    """Seconds of each step; the values are compared with the expected ones."""
    n_rows = len(expected)
    order = np.random.default_rng(1).permutation(n_rows)
    clock = [time.perf_counter()]
    create_dataset(path, data, overwrite=True)
    clock.append(time.perf_counter())
    dataset = open_dataset(path)
    clock.append(time.perf_counter())
    rows = dataset.layout.empty(n_rows)
    dataset.read_into(rows, np.arange(n_rows), order)
    clock.append(time.perf_counter())
    some = dataset.layout.empty(-(-n_rows // 100))
    dataset.read_into(some, np.arange(len(some)), order[: len(some)])
    clock.append(time.perf_counter())
    for block in (rows, some):
        columns = [dataset.layout.column(block, name).reshape(len(block), -1) for name in dataset.arrays]
        assert np.array_equal(np.hstack(columns), expected[order[: len(block)]])
    return dict(zip(STEPS, np.diff(clock).tolist(), strict=True))


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    matrix = np.random.default_rng(0).random((options.rows, options.columns), np.float32)
    # Names in the order of the columns, as the arrays of a dataset are sorted by name.
    frame = pd.DataFrame(matrix, columns=[f"c{number:06}" for number in range(options.columns)])
    best: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="dshuffle-columns-") as folder:
        for _ in range(options.repeats):
            for way, data in {"matrix": {"x": matrix}, "columns": frame}.items():
                found = seconds(Path(folder) / way, data, matrix)
                best[way] = {step: min(value, best.get(way, found)[step]) for step, value in found.items()}
    for one in best.values():
        one["create, open, read"] = sum(one[step] for step in STEPS[:3])
    best["ratio"] = {step: value / best["matrix"][step] for step, value in best["columns"].items()}
    print(f"{'seconds':20s}{'matrix':>10s}{'columns':>10s}{'ratio':>10s}")
    for step in best["ratio"]:
        print(f"{step:20s}" + "".join(f"{best[way][step]:10.3f}" for way in best))
    print(json.dumps(best))
    return best


if __name__ == "__main__":
    main()
