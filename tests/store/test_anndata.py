"""Stores that AnnData has written are opened as they are."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from dshuffle.errors import DatasetError
from dshuffle.store import open_dataset

anndata = pytest.importorskip("anndata", reason="anndata is not installed")

RNG = np.random.default_rng(0)


@pytest.fixture(params=[2, 3])
def cells(request, tmp_path):
    import pandas as pd
    from scipy import sparse

    frame = pd.DataFrame(
        {"depth": RNG.random(9), "kind": pd.Categorical(list("abcabcabc")), "n": np.arange(9)},
        index=[f"cell{number}" for number in range(9)],
    )
    data = anndata.AnnData(
        X=RNG.random((9, 5), dtype="f4"),
        obs=frame,
        obsm={"X_pca": RNG.random((9, 2)), "sparse": sparse.csr_matrix(np.eye(9))},
        layers={"counts": RNG.integers(0, 9, (9, 5))},
        varm={"loadings": RNG.random((5, 2))},
        uns={"scalar": 3},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.settings.zarr_write_format = request.param
        data.write_zarr(tmp_path / "a.zarr")
    return data


def test_anndata_opens_as_it_is(cells, tmp_path):
    dataset = open_dataset(tmp_path / "a.zarr")
    ids = np.array([8, 0, 4])
    read = dataset.read_rows(ids)
    assert {"X", "layers/counts", "obs/depth", "obs/n", "obsm/X_pca"} == set(read)
    np.testing.assert_array_equal(read["X"], cells.X[ids])
    np.testing.assert_array_equal(read["layers/counts"], cells.layers["counts"][ids])
    np.testing.assert_array_equal(read["obs/depth"], cells.obs["depth"].to_numpy()[ids])
    np.testing.assert_array_equal(read["obsm/X_pca"], cells.obsm["X_pca"][ids])
    assert "csr_matrix, and rows of different lengths" in dataset.skipped["obsm/sparse"]
    assert 'arrays=["obs/kind/codes", ...]' in dataset.skipped["obs/kind"]
    assert "obs/_index" in dataset.skipped
    codes = open_dataset(tmp_path / "a.zarr", arrays=["X", "obs/kind/codes"]).read_rows(ids)["obs/kind/codes"]
    np.testing.assert_array_equal(codes, cells.obs["kind"].cat.codes.to_numpy()[ids])


def test_a_sparse_matrix_is_refused_with_what_is_missing(cells, tmp_path):
    with pytest.raises(DatasetError, match="it is a csr_matrix, and rows of different lengths cannot be read"):
        open_dataset(tmp_path / "a.zarr", arrays=["obsm/sparse"])
