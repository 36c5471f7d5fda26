import warnings

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.sharding import Sharding, ShardingWarning, stratified


def test_small_classes_are_allowed_warned_of_and_counted():
    labels = np.repeat([0, 1, 2, 9], [50, 3, 2, 12])
    with pytest.warns(ShardingWarning, match=r"2 of 4 classes .* workers \(12\).* smallest is 2 with 2"):
        ranks = stratified(labels, 12)
    sharding = Sharding(ranks, 12, np.empty(0, np.int64))
    assert np.ptp(sharding.counts(labels), axis=1).max() <= 1
    assert sharding.counts(labels).sum(axis=1).tolist() == [50, 3, 2, 12]


def test_no_warning_where_every_worker_gets_some():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stratified(np.arange(24) % 2, 12)


def test_ranks_and_broadcast_are_checked():
    with pytest.raises(InvalidParameter, match=r"ranks\[1\]=2"):
        Sharding(np.array([0, 2], np.int32), 2, np.empty(0, np.int64))
    with pytest.raises(InvalidParameter, match="broadcast"):
        Sharding(np.array([0, 1], np.int32), 2, np.array([2]))
