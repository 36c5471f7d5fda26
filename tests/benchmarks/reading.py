"""Rows out of chunks, beside obstore fetching the same objects and doing nothing with them: on a local disk or S3.

    python tests/benchmarks/reading.py
    AWS_ENDPOINT_URL=http://... AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \
        python tests/benchmarks/reading.py --url s3://bucket/benchmark

Local files are in the page cache. The ways take turns and the best of each counts: read the ratios. Each is given the
same objects in the same order, 64 at a time; ours also compares checksums (or decompresses), and scatters rows of 4 KiB
to random places. ``zarr`` is our reader with zarr's codec pipeline instead of its own decoders, and ``zarrs``, on a
local disk where it is installed, is the same with the codec pipeline of that package on a bare store.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore
import zarr
from obstore.store import LocalStore, S3Store
from zarr.codecs import ZstdCodec

from dshuffle.store import Dataset, create_dataset, open_dataset
from dshuffle.store.places import open_store

ROW_BYTES = 4096
CHUNK_KIB = (256, 64)
IN_FLIGHT = 64


class Case:
    """One dataset and the ways to read it."""

    def __init__(self, url: str, chunk_kib: int, mib: int, zstd: bool) -> None:
        self.url = url
        rows = (mib << 20) // ROW_BYTES
        chunk_rows = (chunk_kib << 10) // ROW_BYTES
        # Of four bits a byte, so that there is something to compress.
        x = np.random.default_rng(0).integers(0, 16, (rows, ROW_BYTES), dtype=np.uint8)
        if zstd:
            group = zarr.create_group(open_store(url, None, read_only=False), overwrite=True)
            group.create_array(
                "x", shape=x.shape, dtype=x.dtype, chunks=(chunk_rows, ROW_BYTES), compressors=ZstdCodec(level=1)
            )[:] = x
            self.dataset = open_dataset(url)
        else:
            self.dataset = create_dataset(url, {"x": x}, chunk_rows=chunk_rows, overwrite=True)
        self.through_zarr = dataclasses.replace(
            self.dataset,
            _sources={
                name: dataclasses.replace(source, decoders=None) for name, source in self.dataset._sources.items()
            },
        )
        self.through_zarrs = through_zarrs(self.through_zarr, url)
        self.objects = open_bare(url)
        self.keys = [f"x/c/{i}/0" for i in range(-(-rows // chunk_rows))]
        self.ids = np.arange(rows)
        self.slots = np.random.default_rng(1).permutation(rows)
        self.rows = self.dataset.layout.empty(rows)
        self.truth = x

    def bare(self) -> int:
        """Bytes as they are stored."""
        todo = iter(self.keys)

        async def fetch() -> int:
            total = 0
            for key in todo:
                answer = await obstore.get_async(self.objects, key)
                total += len(await answer.bytes_async())
            return total

        async def main() -> int:
            return sum(await asyncio.gather(*(fetch() for _ in range(IN_FLIGHT))))

        return asyncio.run(main())

    def read(self, dataset: Dataset) -> int:
        before = dataset.traffic
        dataset.read_into(self.rows, self.slots, self.ids)
        return (dataset.traffic - before).fetched_bytes


def through_zarrs(dataset: Dataset, url: str) -> Dataset | None:
    """The same dataset with the codec pipeline of zarrs, which reads local files itself."""
    if importlib.util.find_spec("zarrs") is None or "://" in url:
        return None
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = zarr.open_array(url, path="x", mode="r")
    return dataclasses.replace(dataset, _sources={"x": dataclasses.replace(dataset._sources["x"], array=array)})


def open_bare(url: str) -> Any:
    """obstore itself, in its default settings."""
    if "://" not in url:
        return LocalStore(prefix=url)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(bucket, prefix=prefix, client_options={"allow_http": True})


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Stored MB/s and CPU seconds a GB of each way, the best of ``repeats`` turns."""
    ways: dict[str, Callable[[], int]] = {
        "bare": case.bare,
        "ours": lambda: case.read(case.dataset),
        "zarr": lambda: case.read(case.through_zarr),
    }
    if (dataset := case.through_zarrs) is not None:
        ways["zarrs"] = lambda: case.read(dataset)
    speeds: dict[str, float] = dict.fromkeys(ways, 0.0)
    cpu: dict[str, float] = dict.fromkeys(ways, float("inf"))
    sizes: set[int] = set()
    for _ in range(repeats):
        for name, run in ways.items():
            case.rows[:] = 255
            wall, used = time.perf_counter(), time.process_time()
            nbytes = run() or next(iter(sizes))  # zarrs reads past our meter
            speeds[name] = max(speeds[name], nbytes / (time.perf_counter() - wall) / 1e6)
            cpu[name] = min(cpu[name], (time.process_time() - used) / nbytes * 1e9)
            sizes.add(nbytes)
            if name != "bare":
                assert np.array_equal(case.rows[case.slots], case.truth)
    assert len(sizes) == 1, sizes
    return {"MB/s": speeds, "CPU s/GB": cpu, "ratio": speeds["ours"] / speeds["bare"]}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an s3:// prefix or a path to write to; by default a temporary folder")
    parser.add_argument("--chunk-kib", type=int, action="append", help="again for several")
    parser.add_argument("--mib", type=int, default=256, help="rows in all")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    folder = None if options.url else tempfile.mkdtemp(prefix="dshuffle-reading-")
    results = {}
    print(f"{'stored MB/s (CPU s/GB)':22s}{'ours / bare':>12s}")
    try:
        for chunk_kib in options.chunk_kib or CHUNK_KIB:
            for zstd in (False, True):
                name = f"{chunk_kib} KiB{', zstd' if zstd else ''}"
                url = f"{options.url or folder}/{chunk_kib}-{'zstd' if zstd else 'plain'}"
                result = results[name] = measure(Case(url, chunk_kib, options.mib, zstd), options.repeats)
                cells = (f"{way} {speed:.0f} ({result['CPU s/GB'][way]:.1f})" for way, speed in result["MB/s"].items())
                print(f"{name:22s}{result['ratio']:12.2f}{''.join(f'{cell:>20s}' for cell in cells)}", flush=True)
    finally:
        if folder:
            shutil.rmtree(folder)
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
