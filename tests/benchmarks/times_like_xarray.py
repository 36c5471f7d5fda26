"""Are dates, durations and packed numbers the values of xarray? The properties of the tests, with more examples.

    python tests/benchmarks/times_like_xarray.py [--examples 10000]

Half of the examples are raw arrays with any attributes, and half are written by xarray. Prints how many of each kind
there were, or the smallest example that fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

PROPERTIES = Path(__file__).parents[1] / "store" / "test_times_like_xarray.py"


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Run both properties; return how many examples ended in which way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    examples = parser.parse_args(arguments).examples
    logging.getLogger("dshuffle.store.open").setLevel(logging.ERROR)  # one line for each undecoded array
    spec = importlib.util.spec_from_file_location(PROPERTIES.stem, PROPERTIES)
    assert spec is not None
    assert spec.loader is not None
    properties = importlib.util.module_from_spec(spec)
    sys.modules[PROPERTIES.stem] = properties  # where its dataclass looks for annotations
    spec.loader.exec_module(properties)
    ends = Counter[str]()
    properties.event = lambda end: ends.update([end])
    many = settings(max_examples=examples // 2, deadline=None)
    many(given(properties.stores())(properties.agree))()
    many(given(properties.datasets(), st.sampled_from([2, 3]))(properties.agree_on_written))()
    for end, count in sorted(ends.items()):
        print(f"{count:7,} {end}")
    return dict(ends)


if __name__ == "__main__":
    main()
