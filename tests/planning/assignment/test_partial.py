"""How well partial exchanges mix: formulas beside draws."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle.errors import MixingWarning
from dshuffle.planning import Partial, first_ranks

from ...draws import next_ranks


@pytest.mark.parametrize("partial", [Partial(0.3), Partial(1.0)])
@pytest.mark.parametrize("n_workers", [2, 3, 5])
def test_the_return_probability_is_that_of_draws(partial, n_workers):
    q = 3000 * n_workers
    first = ranks = first_ranks("random", q, n_workers, seed=1)
    for epoch in range(1, 6):
        ranks = next_ranks(partial, ranks, n_workers, seed=1, epoch=epoch)
        sizes = np.bincount(ranks, minlength=n_workers)
        assert sizes.min() == sizes.max()
        persistence = 1 - partial.fraction * n_workers / (n_workers - 1)
        expected = 1 / n_workers + (1 - 1 / n_workers) * persistence**epoch
        assert np.mean(ranks == first) == pytest.approx(expected, abs=5 * math.sqrt(0.25 / q))


def test_two_workers_that_exchange_everything_mix_nothing():
    assert "mixes no better than 'partial:0'" in Partial(1.0).warning(2)
    assert Partial(0.5).warning(2) == Partial(1.0).warning(1) == Partial(0.9).warning(10) == ""
    assert "'partial:0.95' mixes no better than 'partial:0.85' on 10 workers" in Partial(0.95).warning(10)


@pytest.mark.slow
def test_a_session_warns_where_more_moves_for_nothing(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.arange(100)})
    with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        with pytest.warns(MixingWarning, match="partial:1.0.*Use 'global' or 'partial:0.5'"):
            dshuffle.Shuffler(client, dataset, assignment="partial:1.0").close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dshuffle.Shuffler(client, dataset, assignment="partial:0.5").close()
