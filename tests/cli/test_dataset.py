from __future__ import annotations

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from PIL import Image

import dshuffle
from dshuffle.cli import compare, main


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


@pytest.mark.slow
def test_rare_keys_are_rare_by_default(tmp_path):
    """The defaults are the data of the default comparison, and a key has five rows of any number of samples."""
    assert run("create", tmp_path / "d.zarr", "--synthetic", "rare-keys").exit_code == 0
    dataset = dshuffle.open_dataset(tmp_path / "d.zarr")
    with compare._datasets(None, copied=False) as (compared, _, _):
        assert dataset.n_samples == compared.n_samples == 7000
        rows = np.arange(0, 7000, 500)
        for name in ("x", "y"):
            assert (dataset.read_rows(rows)[name] == compared.read_rows(rows)[name]).all()
    assert run("create", tmp_path / "e.zarr", "--synthetic", "rare-keys", "--samples", 50).exit_code == 0
    assert dshuffle.open_dataset(tmp_path / "e.zarr").arrays["x"].shape == (10,)


def test_create_keeps_what_stands_there_unless_told(url):
    arguments = ("create", url, "--synthetic", "regression", "--samples", 50)
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "already exists" in refused.stderr
    assert dshuffle.open_dataset(url).n_samples == 1000
    assert run(*arguments, "--overwrite").exit_code == 0
    assert dshuffle.open_dataset(url).n_samples == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Exactly one of --from, --from-folder, --synthetic is required"),
        ("--synthetic images", "--synthetic"),
        ("--synthetic regression --samples 0", "--samples"),
        ("--synthetic regression --from x.npy", "Exactly one of"),
        ("--synthetic classification --noise 1", "--noise cannot be used with --synthetic classification"),
        ("--from x.npy --noise 1", "--noise cannot be used with --from"),
        ("--from x.npy --image-size 8 8", "--image-size cannot be used with --from"),
        ("--from-folder images --image-size 8", "--image-size"),
        ("--from-folder images --from x.npy", "Exactly one of"),
    ],
)
def test_create_with_options_that_make_no_sense_is_a_usage_error(tmp_path, options, message):
    result = run("create", tmp_path / "d.zarr", *options.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_create_from_files(tmp_path):
    x, y = np.random.default_rng(0).random((50, 3)), np.arange(50)
    np.save(tmp_path / "x.npy", x)
    np.savez_compressed(tmp_path / "more.npz", y=y, z=y)
    files = ("--from", tmp_path / "x.npy", "--from", tmp_path / "more.npz")
    result = run("create", tmp_path / "d.zarr", *files, "--array", "x", "--array", "y")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("wrote 50 samples of 32 B (1.60 kB) to ")
    assert result.stderr.splitlines() == ["50/100 rows read: x", "100/100 rows read: y"]
    found = dshuffle.open_dataset(tmp_path / "d.zarr").read_rows(np.arange(50))
    assert set(found) == {"x", "y"}
    assert np.array_equal(found["x"], x)
    assert np.array_equal(found["y"], y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "nowhere.npy"), "nowhere.npy does not exist"),
        (("--from", "x.npy", "--from", "y.npy"), "their lengths are"),
        (("--from", "notes.txt"), "a file of .npy, .npz, .parquet, .parq, .pq, or a Zarr group"),
    ],
)
def test_create_from_what_makes_no_dataset_is_an_error_of_one_line(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.arange(5))
    np.save("y.npy", np.arange(6))
    (tmp_path / "notes.txt").write_text("milk")
    before = sorted(tmp_path.iterdir())
    result = run("create", "d.zarr", *options)
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_create_from_a_folder_of_images(tmp_path):
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (60, 40), 200).save(tmp_path / "images" / name / "0.png")
    Image.new("RGB", (30, 40), 200).save(tmp_path / "images" / "dogs" / "1.png")
    (tmp_path / "images" / "dogs" / "2.heic").write_bytes(b"of another kind")
    unsized = run("create", tmp_path / "d.zarr", "--from-folder", tmp_path / "images")
    assert unsized.stderr.startswith("Error: --image-size is needed, as images differ in size: ")
    options = ("--from-folder", tmp_path / "images", "--image-size", 8, 12)
    result = run("create", tmp_path / "d.zarr", *options)
    assert result.exit_code == 0, result.output
    assert "classes: 0 cats, 1 dogs" in result.stdout
    assert f"left out: 1 file is not an image: {tmp_path / 'images' / 'dogs' / '2.heic'}" in result.stderr
    rows = dshuffle.open_dataset(tmp_path / "d.zarr").read_rows([0, 1, 2])
    assert rows["x"].shape == (3, 8, 12, 3)
    assert rows["y"].tolist() == [0, 1, 1]
    assert zarr.open_group(tmp_path / "d.zarr", mode="r")["y"].attrs["classes"] == ["cats", "dogs"]


def test_create_writes_the_classification_that_was_asked_for(tmp_path):
    options = ("--samples", 90, "--features", 4)
    assert run("create", tmp_path / "c.zarr", "--synthetic", "classification", *options).exit_code == 0
    blobs = dshuffle.open_dataset(tmp_path / "c.zarr").read_rows(np.arange(90))
    assert blobs["x"].shape == (90, 4)
    assert np.bincount(blobs["y"]).tolist() == [9] * 10


def test_info_describes_every_array(url):
    table = run("info", url)
    assert table.exit_code == 0
    for text in ("1,000 samples of 44 B", "float32", "(10,)", "300", "40.0 kB", "4.00 kB"):
        assert text in table.stdout


def test_verify_lists_the_corrupt_chunks(url):
    good = run("verify", url)
    assert good.exit_code == 0
    assert good.stdout == "8 chunks, 44.0 kB: all are good\n"
    chunks = sorted((url / "x" / "c").rglob("*"))
    victim = next(path for path in chunks if path.is_file())
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    result = run("verify", url)
    assert result.exit_code == 1
    assert "chunk (0, 0) of array 'x'" in result.stdout
    assert "1 of 8 chunks are bad" in result.stderr
