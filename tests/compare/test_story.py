"""What the README says that `dshuffle compare` answers is what it answers, on both kinds of generated data."""

import re
from pathlib import Path

import pytest

import dshuffle
from dshuffle.cli import compare
from dshuffle.cli import dataset as options
from dshuffle.compare import Way, default_ways
from dshuffle.compare.pairs import regression_in_pairs
from dshuffle.noninferiority import holm
from dshuffle.planning import Choices
from dshuffle.synthetic import keyed_regression, rare_keys_regression

README = Path(__file__).parents[2] / "README.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not README.exists(), reason="the README is not here")]


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL)


def test_reshuffling_pays_for_the_default_data_if_models_are_averaged_once_an_epoch(blocks):
    n_keys = options.RARE_KEYS_SAMPLES // options.RARE_KEYS_ROWS
    arrays = rare_keys_regression(options.RARE_KEYS_SAMPLES, n_keys, noise=options.RARE_KEYS_NOISE)
    dataset = dshuffle.create_dataset("memory://story", arrays, chunk_rows=compare.CHUNK_ROWS, overwrite=True)
    tested = regression_in_pairs(dataset, default_ways(), n_workers=4, epochs=5, pairs=10)
    assert {runs.outcome.value for runs in tested["gradients"].values()} == {"not worse"}
    assert all(p_value <= 0.05 for p_value in holm(tested["gradients"]).values())
    [block] = (block for block in blocks if "gradients averaged" in block)
    models = tested["models"]
    for label, runs in models.items():
        assert runs.outcome.value == "worse"
        first = re.escape(" ".join(label.split()[:2]))  # names are wrapped
        row = re.search(rf"^{first}.*? not worse +\+([\d.]+) %", block, re.MULTILINE)
        assert float(row[1]) == pytest.approx(100 * runs.mean, rel=0.02)
    stored, once, partial = (
        models[label].mean
        for label in ("local, as stored", "local, shuffled once", "partial:0.1 + peer, from stored order")
    )
    assert stored > 1.2 * partial > 5 * once
    # A chunk holds whole keys, so chunks that are shuffled help as little as none.
    assert models["chunks + storage"].mean == pytest.approx(stored, rel=0.1)


def test_one_shuffle_is_enough_for_frequent_keys():
    dataset = dshuffle.create_dataset("memory://frequent", keyed_regression(100_000, noise=0.1), overwrite=True)
    ways = [Way("local", Choices("local")), Way("global + peer", Choices("global"))]
    for runs in regression_in_pairs(dataset, ways, n_workers=4, epochs=5, pairs=10).values():
        assert runs["local"].outcome.value == "not worse"
