"""Errors of the library name the options of the command that ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", "--samples", 100, "--workers", 4, "--cache-fraction", 3), "--cache-fraction=3.0 is not allowed"),
        *(
            (
                ("advise", "--samples", 100, "--row-bytes", 10, "--workers", 4, "--bandwidth", "1gbit", option, "inf"),
                f"{option}=inf is not allowed",
            )
            for option in ("--egress-price", "--worker-egress-price", "--request-price")
        ),
        (("dataset", "create", "{0}/new", "--from", "{0}/x.csv"), "--from='{0}/x.csv' is not allowed"),
        (("dataset", "create", "{0}/new", "--from", "{0}/x.npy", "--array", "y"), "--array=['y'] is not allowed"),
        (("dataset", "shuffle", "{0}/d", "{0}/new", "--memory", "much"), "--memory='much' is not allowed"),
        (("dataset", "shuffle", "{0}/d", "{0}/new", "--by", "z"), "--by='z' is not allowed"),
        (("dataset", "create", "{0}/d", "--from", "{0}/x.npy"), "{0}/d already exists; replace it with --overwrite\n"),
        (
            ("dataset", "create", "{0}/new", "--from", "{0}/x.npy", "--shard-rows", 3),
            "--shard-rows=3 is not allowed; it must be a multiple of --chunk-rows (None). Give --chunk-rows too.",
        ),
        (("compare", "{0}/d", "--delivery", "pear"), "--delivery='pear' is not allowed"),
        (("compare", "{0}/d", "--target", "z"), "--target='z' is not allowed"),
        (("compare", "{0}/d", "--shuffled", "{0}/d"), "--shuffled is not allowed: <Dataset"),
    ],
)
def test_an_error_names_the_option(tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.ones(3))
    (tmp_path / "x.csv").write_text("1,2\n")
    dshuffle.create_dataset(tmp_path / "d", {"x": np.ones((9, 2)), "y": np.ones(9)})
    ran = CliRunner().invoke(main, [str(argument).format(tmp_path) for argument in arguments])
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"Error: {told.format(tmp_path)}")


def test_arrays_that_the_files_have_are_listed(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(3), b=np.ones(3))
    ran = CliRunner().invoke(
        main, ["dataset", "create", f"{tmp_path}/new", "--from", f"{tmp_path}/x.npz", "--array", "c"]
    )
    assert "They have a, b." in ran.stderr


@pytest.mark.slow
def test_what_draws_nothing_does_not_load_bokeh():
    """Half a second of the start of a command, or of a worker."""
    modules = ["dshuffle.cli.dataset", "dshuffle.cli.plan", "dshuffle.training", "dshuffle.pipeline"]
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name), print('bokeh' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == ["False"] * len(modules), ran.stderr


@pytest.mark.slow
def test_sigterm_leaves_no_temporary_dataset(tmp_path):
    """Batch systems send it."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = "from dshuffle.cli import main; main()"
    command = [sys.executable, "-c", program, "compare", "--output", str(tmp_path / "report")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        for line in running.stderr:
            if "loading compiled code" in line:
                break
        assert list(tmp_path.glob("dshuffle-*/*.zarr"))
        running.terminate()
        running.stderr.read()
        assert running.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("dshuffle-*/*.zarr"))
