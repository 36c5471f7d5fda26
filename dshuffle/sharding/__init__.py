"""Sharding: first assignments made from labels and features, offline, before there is a session.

``distribution_aware`` loads on first use: sessions know of shardings, and need no scikit-learn for that.
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
