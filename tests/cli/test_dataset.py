from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["dataset", *map(str, arguments)])


@pytest.fixture
def url(tmp_path):
    url = tmp_path / "d.zarr"
    result = run("create", url, "--synthetic", "regression", "--samples", 1000, "--features", 10, "--chunk-rows", 300)
    assert result.exit_code == 0, result.output
    assert "wrote 1,000 samples of 44 B (44.0 kB)" in result.stdout
    return url


def test_create_writes_the_regression_that_was_asked_for(url):
    dataset = dshuffle.open_dataset(url)
    assert dataset.n_samples == 1000
    assert dataset.arrays["x"].shape == (10,)
    assert dataset.arrays["x"].chunk_rows == 300
    keys = dataset.read_rows(np.arange(1000))["x"][:, :6].argmax(axis=1)
    assert set(keys) == set(range(6)), "three fifths of the features are a key"


def test_create_keeps_what_stands_there_unless_told(url):
    arguments = ("create", url, "--synthetic", "regression", "--samples", 50)
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "exists already" in refused.stderr
    assert dshuffle.open_dataset(url).n_samples == 1000
    assert run(*arguments, "--overwrite").exit_code == 0
    assert dshuffle.open_dataset(url).n_samples == 50


@pytest.mark.parametrize(
    "options",
    [(), ("--synthetic", "images"), ("--synthetic", "regression", "--samples", 0)],
)
def test_create_with_options_that_make_no_sense_is_a_usage_error(tmp_path, options):
    assert run("create", tmp_path / "d.zarr", *options).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_info_describes_every_array(url):
    table = run("info", url)
    assert table.exit_code == 0
    for text in ("1,000 samples of 44 B", "float32", "(10,)", "300", "40.0 kB", "4.00 kB"):
        assert text in table.stdout
    described = json.loads(run("info", url, "--json").stdout)
    assert described["bytes"] == 44_000
    assert {array["name"]: array["bytes"] for array in described["arrays"]} == {"x": 40_000, "y": 4_000}


def test_verify_passes_a_good_dataset(url):
    result = run("verify", url)
    assert result.exit_code == 0
    assert result.stdout == "8 chunks, 44.0 kB: all are good\n"


def test_verify_lists_the_corrupt_chunks(url):
    chunks = sorted((url / "x" / "c").rglob("*"))
    victim = next(path for path in chunks if path.is_file())
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    result = run("verify", url)
    assert result.exit_code == 1
    assert "chunk (0, 0) of array 'x'" in result.stdout
    assert "1 of 8 chunks are bad" in result.stderr
