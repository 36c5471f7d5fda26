"""What users see of the objects that they hold, in a terminal and in a notebook."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle.notebook import html_summary
from dshuffle.training import History, fit_linear_regression


def test_html_is_escaped():
    assert "<script>" not in html_summary("<script>", {"<script>": "<script>"})


@pytest.mark.slow
def test_every_object_says_what_it_is():
    arrays = {"x": np.ones((1000, 4)), "y": np.arange(1000.0)}
    dataset = dshuffle.create_dataset("memory://test-repr", arrays, overwrite=True)
    with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        with dshuffle.Shuffler(client, dataset, cache_fraction=0.75) as shuffler:
            assert "workers 2" in repr(shuffler)
            assert "epoch" not in repr(shuffler)
            history = fit_linear_regression(shuffler, epochs=3, step=1e-4)
            assert "epoch 2" in repr(shuffler)
            assert "global" in shuffler._repr_html_()
        with dshuffle.Shuffler(client, dataset) as other:
            [epoch] = other.epochs(1)
            assert repr(epoch).startswith("<Epoch 0 of <Shuffler")
            shown = client.gather(epoch.map(repr))
        assert shown[0].startswith("<Partition rank=0 epoch=0 samples=500")
    assert repr(shuffler).startswith("<closed Shuffler global + peer of memory://test-repr")
    record = shuffler.records[1]
    assert repr(record).startswith("<EpochRecord 1: global + peer; workers 2")
    assert "samples received" in record._repr_html_()
    assert pickle.loads(pickle.dumps(record)) == record
    assert repr(history).startswith("<History of 3 epochs: error ")
    assert len(repr(history)) < 100
    assert repr(History((), None)) == "<History of 0 epochs>"
