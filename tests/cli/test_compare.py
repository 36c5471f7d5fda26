from __future__ import annotations

import json
import shutil
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.cli.compare import GENERATED, _datasets
from dshuffle.compare import EmulatedRates, default_ways, local_cluster
from dshuffle.planning import Choices
from dshuffle.store import write_sharding
from dshuffle.synthetic import keyed_regression
from dshuffle.units import NO_BREAK

from .conftest import run


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        (1, "--assignment globl", "assignment='globl'"),
        (1, "--delivery pear", "'peer', 'server', 'storage'"),
        (1, "--assignment partial:2", "partial:2"),
        (1, "nothing.zarr", "nothing.zarr"),
        (1, "--margin 0", "--margin='0' is not allowed; it must be a number > 0 in the unit of the metric, or a per"),
        (1, "--margin -1%", "--margin='-1%' is not allowed"),
        (1, "--pairs 4", "--pairs=4 is not allowed; it must be an integer >= 5"),
        (1, "--assignment local --choice every=2", "every=2 is not allowed; it must be 1 with assignment='local'"),
        (1, "--links fast", "--links='fast' is not allowed; it must be a rate > 0 such as '100mbit'"),
        (2, "--scheduler tcp://127.0.0.1:1", "--scheduler needs DATASET"),
        (2, "--choice balance", "--choice balance: give NAME=VALUE with one of relay, every, between, caching"),
        (2, "--choice delivery=peer", "--choice delivery=peer: give NAME=VALUE with one of"),
        (2, "--choice seed=1 --choice seed=2", "--choice seed=2: give NAME=VALUE with one of relay, every,"),
        (2, "--workers 0", "--workers"),
        (2, "--epochs x", "--epochs"),
        (2, "--output file", "--output"),
        (2, "d.zarr --scheduler tcp://127.0.0.1:1 --store 1gbit", "--store cannot be used with --scheduler"),
        (2, "--train linear_regression", "--train needs DATASET"),
        (2, "d.zarr --train linear_regression", "--train needs --metric NAME"),
        (2, "--metric loss", "--metric needs --train: the linear regression is tested by its rmse"),
        (2, "--higher-is-better", "--higher-is-better needs --train"),
        (2, "--lower-is-better", "-is-better needs --train"),
        (2, "--pairs -1", "--pairs"),
        (2, "--choice every=5", "--choice every=5 needs --epochs 6 or more"),
    ],
)
def test_bad_choices_are_told_in_a_line(elsewhere, code, options, message):
    (elsewhere / "file").write_text("")
    result = run(*options.split())
    assert result.exit_code == code
    assert message in result.stderr
    assert code == 2 or len(result.stderr.splitlines()) == 1  # a usage error has the usage above
    assert result.stdout == ""


def test_a_dataset_that_is_no_regression_names_the_options(elsewhere, tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.ones((9, 2), int), "label": np.ones(9)})
    result = run(tmp_path / "d.zarr", "--target", "label")
    assert result.exit_code == 1
    assert "--features" in result.stderr
    assert "2-D array of float32 or float64 (it is 2-D, int64)" in result.stderr
    assert (
        "it must be one of the dataset's arrays: label, x"
        in run(tmp_path / "d.zarr").stderr + run(tmp_path / "d.zarr", "--features", "z").stderr
    )


def test_a_default_way_without_a_chunk_for_every_worker_is_left_out(elsewhere, url, monkeypatch):
    ran = []
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda one, *_, **__: ran.extend(one.ways) or 1 / 0)
    result = run(url, "--pairs", 0)
    assert isinstance(result.exception, ZeroDivisionError), "all but that strategy would have been run"
    assert "“chunks + storage” is left out: chunk_rows=400 is not allowed; it must be at most 133" in result.stderr
    assert [way.label for way in ran] == [way.label for way in default_ways() if not way.choices.assignment.in_chunks]
    ran.clear()
    result = run(url, "--cache-fraction", 0.5, "--workers", 65, "--pairs", 0)
    assert "“global + ubershuffle” is left out: n_workers=65 is not allowed; it must be at most 64" in result.stderr
    left = {way.label for way in default_ways(Choices(cache_fraction=0.5))} - {way.label for way in ran}
    assert left == {"chunks + storage", "global + ubershuffle", "global + clique", "aligned + clique"}
    chosen = run(url, "--assignment", "chunks", "--delivery", "storage")
    assert chosen.exit_code == 1
    assert "chunk_rows=400" in chosen.stderr


def test_results_are_printed_before_the_report_is_written(elsewhere, url, monkeypatch):
    """A full disk does not lose what was measured."""

    def full(*_):
        raise OSError(28, "No space left on device")

    shown = []
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda *_, **__: SimpleNamespace(comparison="figures"))
    monkeypatch.setattr("dshuffle.report.render_text", lambda comparison, width: shown.append(comparison))
    monkeypatch.setattr("dshuffle.report.write_report", full)
    result = run(url, "--pairs", 0)
    assert shown == ["figures"]
    assert result.exit_code == 1
    assert "The report could not be written to dshuffle-report: [Errno 28] No space left" in result.stderr
    assert "report='/proc/self': " in run(url, "--pairs", 0, "--output", "/proc/self").stderr


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ("", EmulatedRates()),
        ("--links 1gbit", EmulatedRates(links=125e6)),
        ("--links none --store 8mbit", EmulatedRates(store=1e6)),
    ],
)
def test_rates_of_the_local_cluster(elsewhere, url, monkeypatch, options, rates):
    started = []
    cluster = "dshuffle.compare.clusters.local_cluster"
    monkeypatch.setattr(cluster, lambda workers, **options: started.append(options["rates"]) or 1 / 0)
    result = run(url, "--pairs", 0, *options.split())
    assert isinstance(result.exception, ZeroDivisionError)
    assert started == [rates]
    assert ("Emulated: " in result.stderr) == (rates != EmulatedRates())
    assert str(rates) in " ".join(result.stderr.split())


@pytest.mark.slow
def test_emulated_links_limit_an_exchange_and_are_said(elsewhere, url):
    result = run(url, "--links", "16mbit", "--store", "64mbit", "--workers", 2, "--epochs", 2, "--delivery", "peer")
    assert result.exit_code == 0, result.output
    words = "links of 16 Mbit/s into and out of each worker, and a store of 64 Mbit/s"
    assert f"Emulated: {words}. --links none --store none measures" in " ".join(result.stderr.split())
    assert f"Emulated: {words}. last error" in " ".join(result.stdout.split())
    folder = elsewhere / "dshuffle-report"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["emulated"] == words
    assert words in (folder / "report.html").read_text().replace(NO_BREAK, " ")
    _, exchanged = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert exchanged["exchange_seconds"] > max(exchanged["wire_sent_bytes"]) * 8 / 16e6


@pytest.mark.slow
def test_json_is_all_that_stdout_holds(elsewhere, url):
    result = run(url, "--workers", 2, "--epochs", 2, "--assignment", "global", "--assignment", "local", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert [way["label"] for way in summary["ways"]] == ["global + peer", "local"]
    assert "use “global + peer”" in summary["verdict"]
    assert "report.html" in result.stderr
    assert "global + peer" in result.stderr, "progress is told without a terminal, too"
    folder = elsewhere / "dshuffle-report"
    assert {path.name for path in folder.iterdir()} == {"report.html", "records.jsonl", "summary.json"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert len((folder / "records.jsonl").read_text().splitlines()) == 4
    assert list(elsewhere.iterdir()) == [folder], "nothing else is left in the working directory"


@pytest.fixture
def labelled(tmp_path):
    """A dataset with classes, the smallest of one sample, and a stored sharding of it."""
    arrays = {**keyed_regression(400), "label": np.repeat([0, 1, 2], [250, 149, 1])}
    dataset = dshuffle.create_dataset(tmp_path / "labelled.zarr", arrays, chunk_rows=100)
    write_sharding(dataset, "mine", np.arange(400) // 200)
    return dataset.url


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--choice sharding=yours", "sharding='yours' is not allowed; it must be one of ['contiguous', 'random', "),
        ("--choice sharding=stratified:x", "sharding='stratified:x' is not allowed; it must be 'stratified:' followed"),
        ("--choice balance=y", "balance='y' is not allowed; it must be None, or one of ['label']"),
        ("--choice balance=label --assignment aligned", "balance='label' is not allowed"),
        ("--choice sharding=mine --workers 3", "--workers=3 is not allowed"),
    ],
)
def test_first_assignments_and_labels_are_checked_before_a_cluster_is_started(elsewhere, labelled, options, message):
    result = run(labelled, "--delivery", "peer", *options.split())
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ways_with_fewer_exchanges_are_compared(elsewhere, url):
    options = "--assignment global --assignment local --choice every=1 --choice every=2 --choice between=reverse"
    result = run(url, "--workers", 2, "--epochs", 3, *options.split(), "--json")
    assert result.exit_code == 0, result.output
    ways = json.loads(result.stdout)["ways"]
    assert [way["label"] for way in ways] == ["global + peer", "global + peer, every 2 epochs, reverse", "local"]
    always, sparse, _ = (way["figures"] for way in ways)
    assert sparse["wire_bytes"] == pytest.approx(always["wire_bytes"] / 2, rel=0.2)
    assert [sorted(way["pairs"]) for way in ways] == [[], *[["gradients", "models"]] * 2], (
        "compared with a new draw in every epoch"
    )
    lines = (elsewhere / "dshuffle-report" / "records.jsonl").read_text().splitlines()
    exchanged = [record["exchanged"] for record in map(json.loads, lines) if record["way"] == ways[1]["label"]]
    assert exchanged == [False, False, True]


@pytest.mark.slow
def test_labels_are_ways_to_start(elsewhere, labelled):
    start = "--assignment global --choice sharding=stratified:label --choice balance=label"
    balanced = run(labelled, "--workers", 2, "--epochs", 2, *start.split())
    assert balanced.exit_code == 0, balanced.output
    assert "global + peer, balance: label" in balanced.stdout
    assert balanced.stderr.count("warning: balance='label': 1 of 3 classes") == 1
    [way] = json.loads((elsewhere / "dshuffle-report" / "summary.json").read_text())["ways"]
    assert (way["sharding"], way["balance"]) == ("stratified:label", "label")


@pytest.mark.slow
def test_a_running_scheduler_is_used(elsewhere, url):
    with local_cluster(2) as client:
        options = f"--scheduler {client.scheduler.address} --epochs 2 --delivery server --output out"
        result = run(url, *options.split())
        assert result.exit_code == 0, result.output
        assert client.status == "running"
    assert "global + server" in result.stdout
    record = json.loads((elsewhere / "out" / "records.jsonl").read_text().splitlines()[-1])
    assert (record["n_workers"], record["server"]) == (2, "dedicated")


@pytest.mark.slow
def test_a_step_that_diverges_is_one_line(elsewhere, url):
    result = run(url, "--workers", 2, "--epochs", 2, "--step", 1e6, "--delivery", "peer")
    assert result.exit_code == 1
    assert "Error: --step=1e+06" in result.stderr
    assert "Take a smaller --step" in result.stderr


@pytest.mark.slow
def test_a_generated_dataset_can_be_written_again(tmp_path):
    """The report has the command, as the dataset was in a temporary folder."""
    _, *words = GENERATED.replace("URL", f"{tmp_path}/again.zarr").split()
    written = CliRunner().invoke(main, words)
    assert written.exit_code == 0, written.output
    again = dshuffle.open_dataset(tmp_path / "again.zarr")
    with _datasets(None, copied=False) as (data, _, _):
        rows, rows_again = (dataset.read_rows(range(0, 7000, 500)) for dataset in (data, again))
        assert data.n_samples == again.n_samples
        assert data.arrays == again.arrays
    assert all((rows[name] == rows_again[name]).all() for name in ("x", "y"))


def test_a_report_that_a_run_replaces_is_named(elsewhere, url, monkeypatch):
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda *_, **__: 1 / 0)
    (elsewhere / "mine").mkdir()
    options = (url, "--pairs", 0, "--output", "mine")
    assert "replaces" not in run(*options).stderr
    (elsewhere / "mine" / "report.html").write_text("")
    assert "This run replaces the report in mine. --output names another folder.\n" in run(*options).stderr
    refused = run(*options, "--target", "absent")
    assert refused.exit_code == 1
    assert "replaces" not in refused.stderr, "a check ended the command before the run"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_default_run(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    result = run()
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    answer = "Reshuffle? No with gradients averaged every step; yes with models averaged once an epoch."
    assert text.startswith(answer)
    metric = "rmse (root mean square error on a held-out tenth of the samples)"
    once = "“local, shuffled once” against reshuffling, in"
    assert f"With gradients averaged in every step, {once} {metric}: not worse by more than 1 %" in text
    assert f"With models averaged once an epoch, {once} rmse: worse: +1" in text
    assert "Not tested" not in text
    assert "Pairs of runs, rmse, models averaged" in text
    summary = json.loads((elsewhere / "dshuffle-report" / "summary.json").read_text())
    assert summary["answer"] == answer
    copies = {way["label"]: way["copy_seconds"] for way in summary["ways"]}
    assert copies.pop("chunks + storage, shuffled on disk") > 0
    assert {*copies.values()} == {None}
    assert "url" not in summary["dataset"], "the temporary folder is gone"
    assert summary["dataset"]["command that writes it"].startswith("dshuffle dataset create URL --synthetic rare-keys")
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if name.startswith("dshuffle-")], "the generated dataset is removed"
    shutil.rmtree(elsewhere / "dshuffle-report")
    assert list(elsewhere.iterdir()) == []
