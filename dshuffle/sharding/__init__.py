"""Sharding: first assignments made from labels and features, offline, before there is a session."""

from dshuffle.errors import ShardingWarning
from dshuffle.sharding.distribution import distribution_aware
from dshuffle.sharding.result import Sharding, class_counts
from dshuffle.sharding.stratified import stratified

__all__ = ["Sharding", "ShardingWarning", "class_counts", "distribution_aware", "stratified"]
