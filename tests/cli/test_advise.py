"""`dshuffle advise` on a running cluster, which it measures."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import LocalCluster

import dshuffle
from dshuffle.cli import main


@pytest.mark.slow
def test_a_cluster_is_measured_and_advised(tmp_path, monkeypatch):
    monkeypatch.setattr("dshuffle.cli.advise.SECONDS", 0.3)
    dataset = str(tmp_path / "data.zarr")
    dshuffle.create_dataset(dataset, {"x": np.random.default_rng(0).random((4000, 64))}, chunk_rows=100)
    options = {"dashboard_address": None, "scheduler_kwargs": {"dashboard": False, "dashboard_address": "127.0.0.1:0"}}
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", **options) as cluster:
        arguments = ["advise", dataset, "--scheduler", cluster.scheduler_address]
        ran = CliRunner().invoke(main, [*arguments, "--cache-fraction", "0.75", "--training", "5", "--json"])
        assert ran.exit_code == 0, ran.output
        answer = json.loads(ran.stdout)
        assert "measuring for up to 0.3 s" in ran.stderr
        assert answer["cluster"]["n_workers"] == 2
        assert answer["measured"]["storage_alone"] > 0
        assert {"global + peer", "global + storage", "chunks + storage"} < {row["way"] for row in answer["ways"]}
        assert answer["recommendation"]["reason"]
        shown = CliRunner().invoke(main, [*arguments, "--assignment", "global"])
        assert shown.exit_code == 0, shown.output
        for words in ("Measured for", "Into a worker", "From the storage", "What would change this"):
            assert words in shown.output
        job = ["--samples", "4000", "--row-bytes", "512", "--scheduler", cluster.scheduler_address]
        ran = CliRunner().invoke(main, ["advise", *job, "--json"])
        assert ran.exit_code == 0, ran.output
        answer = json.loads(ran.stdout)
        assert answer["measured"]["storage_alone"] is answer["measured"]["busy_storage"] is None
        assert answer["measured"]["link_together"] > 0
        ways = {row["way"]: row["row_nbytes"] for row in answer["ways"]}
        assert ways["global + peer"] == 512
        assert not any("storage" in way for way in ways)
        shown = CliRunner().invoke(main, ["advise", *job, "--assignment", "global"])
        assert "The storage was not measured: that needs DATASET." in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80


def test_there_must_be_a_dataset(tmp_path):
    dataset = str(tmp_path / "data.zarr")
    ran = CliRunner().invoke(main, ["advise", dataset, "--scheduler", "tcp://127.0.0.1:9"])
    assert ran.exit_code == 1
    assert "no dataset exists at" in ran.output
