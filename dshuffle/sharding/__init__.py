"""First assignments computed offline from labels and features, before a session starts.

``distribution_aware`` is imported on first use, because sessions import this package but do not need scikit-learn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dshuffle.errors import ShardingWarning
from dshuffle.sharding.sharding import Sharding, class_counts, stratified

if TYPE_CHECKING:
    from dshuffle.sharding.distribution import distribution_aware

__all__ = ["Sharding", "ShardingWarning", "class_counts", "distribution_aware", "stratified"]


def __getattr__(name: str) -> object:
    if name != "distribution_aware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = importlib.import_module("dshuffle.sharding.distribution").distribution_aware
    globals()[name] = value
    return value
