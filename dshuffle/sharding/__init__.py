"""First assignments computed offline from labels and features, before a session starts.

``distribution_aware`` is imported on first use, because sessions import this package but do not need scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.errors import ShardingWarning
from dshuffle.lazy_names import loader
from dshuffle.sharding.sharding import Sharding, stratified

if TYPE_CHECKING:
    from dshuffle.sharding.distribution import distribution_aware

__all__ = ["Sharding", "ShardingWarning", "distribution_aware", "stratified"]

__getattr__ = loader(__name__, {"distribution_aware": "dshuffle.sharding.distribution"})
