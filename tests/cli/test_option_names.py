"""Errors of the library name the options of the command that ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.cli.options import one_line
from dshuffle.errors import DatasetExists, DatasetNotFound, InvalidParameter, PeerFailed

ADVISE = ("advise", "--samples", 100, "--row-bytes", 10, "--workers", 4, "--bandwidth", "1gbit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ADVISE, "--cache-fraction", 3), "--cache-fraction=3.0 is not allowed"),
        ((*ADVISE, "--egress-price", "inf"), "--egress-price=inf is not allowed"),
        (("dataset", "create", "{0}/new", "--from", "{0}/x.csv"), "--from='{0}/x.csv' is not allowed"),
        (("dataset", "create", "{0}/new", "--from", "{0}/x.npy", "--array", "y"), "--array=['y'] is not allowed"),
        (("dataset", "shuffle", "{0}/d", "{0}/new", "--memory", "much"), "--memory='much' is not allowed"),
        (("dataset", "create", "{0}/d", "--from", "{0}/x.npy"), "{0}/d already exists; replace it with --overwrite\n"),
        (("compare", "{0}/d", "--delivery", "pear"), "--delivery='pear' is not allowed"),
        (("compare", "{0}/d", "--target", "z"), "--target='z' is not allowed"),
    ],
)
def test_an_error_names_the_option(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.ones(3))
    (tmp_path / "x.csv").write_text("1,2\n")
    dshuffle.create_dataset(tmp_path / "d", {"x": np.ones((9, 2)), "y": np.ones(9)})
    ran = CliRunner().invoke(main, [str(argument).format(tmp_path) for argument in arguments])
    assert ran.exit_code == 1
    assert f"Error: {message.format(tmp_path)}" in ran.stderr


TRAIN = click.Command("train", params=[click.Option(["--batch-size"]), click.Option(["--cache-fraction"])])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            InvalidParameter.of("cache_fraction", 0.1, "larger", "Take a larger cache_fraction. Or less"),
            "--cache-fraction=0.1 is not allowed; it must be larger. Take a larger --cache-fraction. Or less",
        ),
        (DatasetExists("/d already exists; replace it with overwrite=True"), "/d already exists; replace it with --ov"),
        (DatasetExists("s3://b/overwrite=True/x already exists"), None),
        (DatasetNotFound("there is no dataset at /data/my batch_size runs/x.zarr"), None),
        (InvalidParameter.because("url", "it is absent", "Give another than /my batch_size runs/x."), None),
        (InvalidParameter.of("features", "the batch_size array", "one of batch_size, y", "Not batch_size, y."), None),
        (PeerFailed("rank 1: a task failed (ValueError: batch_size too big)"), None),
    ],
)
def test_what_is_no_parameter_is_not_changed(error, message):
    assert one_line(error, TRAIN).message.startswith(message or str(error))


@pytest.mark.slow
def test_sigterm_leaves_no_temporary_dataset(tmp_path):
    """Batch systems send it."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = "from dshuffle.cli import script; script()"
    command = [sys.executable, "-c", program, "compare", "--pairs", "0", "--output", str(tmp_path / "report")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        for line in running.stderr:
            if "loading compiled code" in line:
                break
        assert list(tmp_path.glob("dshuffle-*/*.zarr"))
        running.terminate()
        running.stderr.read()
        assert running.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("dshuffle-*/*.zarr"))
