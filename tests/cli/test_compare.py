from __future__ import annotations

import json
import shutil
import sys
import tempfile
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.compare import EmulatedRates, default_ways, local_cluster
from dshuffle.planning import Choices
from dshuffle.store import write_sharding
from dshuffle.synthetic import keyed_regression


def run(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("dshuffle.pipeline.run.MEASURING_SECONDS", 0.5)
    return folder


@pytest.fixture
def url(tmp_path):
    url = tmp_path / "d.zarr"
    dshuffle.create_dataset(url, keyed_regression(400))
    return url


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--assignment", "globl"), "assignment='globl'"),
        (("--delivery", "pear"), "'peer', 'server', 'storage'"),
        (("--assignment", "partial:2"), "partial:2"),
        (("nothing.zarr",), "nothing.zarr"),
        (("--margin", "0"), "--margin='0' is not allowed; it must be a number > 0 in the unit of the metric, or a per"),
        (("--margin", "-1%"), "--margin='-1%' is not allowed"),
        (("--pairs", 4), "--pairs=4 is not allowed; it must be an integer >= 5"),
        (("--assignment", "local", "--every", 2), "--every=2 is not allowed; it must be 1 with assignment='local'"),
        (("--links", "fast"), "--links='fast' is not allowed; it must be a rate > 0 such as '100mbit'"),
    ],
)
def test_bad_choices_are_one_line_and_exit_code_1(elsewhere, options, message):
    result = run(*options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheduler", "tcp://127.0.0.1:1"), "--scheduler needs DATASET"),
        (("--sharding", "random"), "--sharding needs --assignment or --delivery"),
        (("--balance", "label"), "--balance needs --assignment or --delivery"),
        (("--shuffled", "d.zarr"), "--shuffled needs DATASET"),
        (("d.zarr", "--shuffled", "s.zarr", "--delivery", "peer"), "omit --assignment and --delivery"),
        (("--workers", 0), "--workers"),
        (("--epochs", "x"), "--epochs"),
        (("--output", "file"), "--output"),
        (("d.zarr", "--scheduler", "tcp://127.0.0.1:1", "--store", "1gbit"), "--store cannot be used with --scheduler"),
        (("--train", "linear_regression"), "--train needs DATASET"),
        (("d.zarr", "--train", "linear_regression"), "--train needs --metric NAME"),
        (("--metric", "loss"), "--metric needs --train: the linear regression is tested by its rmse"),
        (("--higher-is-better",), "--higher-is-better needs --train"),
        (("--lower-is-better",), "--lower-is-better needs --train"),
        (("--pairs", -1), "--pairs"),
        (("--every", 2), "--every needs --assignment or --delivery: in the default ways, every epoch has an exchange"),
        (("--between", "reverse"), "--between needs --assignment or --delivery: in the default ways, every epoch has"),
        (("--assignment", "global", "--every", 0), "--every"),
        (("--assignment", "global", "--every", 5), "--every 5 needs --epochs 6 or more"),
        (("--assignment", "global", "--between", "reverse"), "--between needs --every K with a K of 2 or more"),
        (("--assignment", "global", "--every", 2, "--between", "x"), "'redraw', 'reverse'"),
    ],
)
def test_bad_usage_is_exit_code_2(elsewhere, options, message):
    (elsewhere / "file").write_text("")
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.stderr


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
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda pipeline, *rest: ran.extend(pipeline.ways) or 1 / 0)
    result = run(url)
    assert isinstance(result.exception, ZeroDivisionError), "all but that way would have been run"
    assert "“chunks + storage” is left out: chunk_rows=400 is not allowed; it must be at most 133" in result.stderr
    assert [way.label for way in ran] == [way.label for way in default_ways() if not way.choices.assignment.in_chunks]
    ran.clear()
    result = run(url, "--cache-fraction", 0.5, "--workers", 65)
    assert "“global + ubershuffle” is left out: n_workers=65 is not allowed; it must be at most 64" in result.stderr
    left = {way.label for way in default_ways(Choices(cache_fraction=0.5))} - {way.label for way in ran}
    assert left == {"chunks + storage", "global + ubershuffle"}
    chosen = run(url, "--assignment", "chunks", "--delivery", "storage")
    assert chosen.exit_code == 1
    assert "chunk_rows=400" in chosen.stderr


def test_results_are_printed_before_the_report_is_written(elsewhere, url, monkeypatch):
    """A full disk does not lose what was measured."""

    def full(*_):
        raise OSError(28, "No space left on device")

    shown = []
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda *arguments: SimpleNamespace(comparison="figures"))
    monkeypatch.setattr("dshuffle.cli.compare._show", lambda comparison, as_json: shown.append(comparison))
    monkeypatch.setattr("dshuffle.cli.compare.write_report", full)
    result = run(url, "--pairs", 0)
    assert shown == ["figures"]
    assert result.exit_code == 1
    assert "The report could not be written to dshuffle-report: [Errno 28] No space left" in result.stderr


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ((), EmulatedRates()),
        (("--links", "1gbit"), EmulatedRates(links=125e6)),
        (("--links", "none", "--store", "8mbit"), EmulatedRates(store=1e6)),
    ],
)
def test_rates_of_the_local_cluster(elsewhere, url, monkeypatch, options, rates):
    started = []
    monkeypatch.setattr(
        "dshuffle.pipeline.clusters.local_cluster", lambda workers, **options: started.append(options["rates"]) or 1 / 0
    )
    result = run(url, *options)
    assert isinstance(result.exception, ZeroDivisionError)
    assert started == [rates]
    assert ("Emulated: " in result.stderr) == (rates != EmulatedRates())
    assert str(rates) in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--train", "nowhere:fit"),
            "--train is not allowed: nowhere:fit cannot be imported: No module named",
        ),
        (("--train", "own:missing"), "--train is not allowed: own:missing cannot be imported: module 'own' has no"),
        (("--train", "linear"), "--train='linear' is not allowed; it must be a function, one of linear_regression"),
        (("--train", "linear_regression"), "missing a required argument: 'step'. Its parameters are epochs, step"),
        (("--train", "own:fit", "--step", 1), "--step is not a parameter of --train own:fit: omit it"),
        (("--train", "own:fit", "--workers", 1), "test: workers=1 is not allowed; it must be an integer >= 2"),
        (
            ("--train", "own:fit", "--delivery", "peer"),
            "test: shuffle=['global + peer'] is not allowed; it must",
        ),
    ],
)
def test_trainings_that_cannot_be_compared(elsewhere, url, monkeypatch, options, message):
    (elsewhere / "own.py").write_text("def fit(shuffler, *, epochs, seed):\n    return {}\n")
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr("dshuffle.pipeline.clusters.local_cluster", lambda *_, **__: pytest.fail("started"))
    result = run(url, "--metric", "loss", *options)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", 1), "--workers=1 is not allowed; it must be an integer >= 2. One worker trains on all samples"),
        (
            ("--delivery", "peer"),
            "--pairs needs a way that reshuffles everything before every epoch, such as global, a",
        ),
        (("--assignment", "local", "--assignment", "partial:0.5"), "--pairs needs a way that reshuffles everything"),
        (("--assignment", "local", "--assignment", "global", "--every", 2), "--pairs needs a way that reshuffles"),
    ],
)
def test_pairs_that_show_nothing_are_refused(elsewhere, url, monkeypatch, options, message):
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda pipeline, *_: 1 / 0)
    result = run(url, "--pairs", 5, *options)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.stderr.split())
    # Nobody asked for pairs: the ways are timed.
    assert isinstance(run(url, *options).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--assignment", "local", "--assignment", "global", "--every", 2), "Add --every 1."),
        (("--assignment", "local"), "Add --assignment global."),
        (("--assignment", "global"), ""),
        (("--assignment", "local", "--assignment", "global"), ""),
    ],
)
def test_why_there_are_no_pairs_is_said(elsewhere, url, monkeypatch, options, hint):
    monkeypatch.setattr("dshuffle.cli.compare.regression_pairs", lambda *_: {})
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda pipeline, *_: 1 / 0)
    sentence = f"No pairs of runs: no way reshuffles everything before every epoch. {hint}\n"
    assert run(url, *options).stderr == (sentence if hint else "")


def test_large_datasets_are_not_read_into_this_process_unasked(elsewhere, url, monkeypatch):
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda pipeline, *_: SimpleNamespace(comparison="figures"))
    monkeypatch.setattr("dshuffle.cli.compare._show", lambda *_: None)
    monkeypatch.setattr("dshuffle.cli.compare.write_report", lambda *_: "page")
    tested = []
    monkeypatch.setattr("dshuffle.cli.compare.regression_pairs", lambda *arguments: tested.append(arguments))
    monkeypatch.setattr("dshuffle.cli.compare.with_pairs", lambda comparison, *_: comparison)
    assert run(url).exit_code == 0
    assert len(tested) == 1
    monkeypatch.setattr("dshuffle.cli.paired_test.MOST_NBYTES", 1000)
    result = run(url)
    assert result.exit_code == 0
    assert "No pairs of runs: the dataset has more than 1.00 kB. --pairs 20 reads it into the memory" in result.stderr
    assert len(tested) == 1
    assert run(url, "--pairs", 5).exit_code == 0
    assert len(tested) == 2
    monkeypatch.setattr("dshuffle.cli.paired_test.MEMORY_FRACTION", 1e-9)
    assert "are more than half of what is available" in " ".join(run(url, "--pairs", 5).stderr.split())


def test_the_direction_of_an_accuracy_is_not_guessed(elsewhere, url, monkeypatch):
    tests = []
    monkeypatch.setattr("dshuffle.cli.compare.run", lambda pipeline, *_: tests.append(pipeline.test) or 1 / 0)
    options = (url, "--train", "linear_regression", "--metric", "val_accuracy", "--step", 0.1)
    result = run(*options)
    assert result.exit_code == 1
    assert "--metric='val_accuracy' is not allowed; it must be given with the direction" in result.stderr
    assert "Add --higher-is-better or --lower-is-better" in result.stderr
    run(*options, "--higher-is-better")
    run(*options, "--lower-is-better")
    assert [test.higher_is_better for test in tests] == [True, False]


@pytest.mark.slow
def test_a_training_of_the_user_is_compared_by_its_metric(elsewhere, url, monkeypatch):
    (elsewhere / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    options = ("--assignment", "local", "--assignment", "global", "--sharding", "contiguous", "--workers", 2)
    result = run(url, "--train", "own:fit", "--metric", "val_loss", "--margin", 0.2, "--pairs", 5, *options, "--json")
    assert result.exit_code == 0, result.output
    local, reshuffled = json.loads(result.stdout)["ways"]
    assert reshuffled["pairs"] is None
    assert [local["pairs"][name] for name in ("metric", "margin", "outcome")] == ["val_loss", "0.2", "worse"]
    assert local["pairs"]["text"] in json.loads(result.stdout)["verdict"]
    # Contiguous shards of 180 rows have half of the keys each.
    assert local["pairs"]["way"] == [0.5] * 5
    assert local["pairs"]["reference"][0] < 0.1
    assert "rmse" not in result.stdout


OWN = """
import numpy as np

def share_of_first_half(partition):
    return np.mean(partition.sample_ids < 180)

def fit(shuffler, *, epochs, seed, test):
    assert test.n_samples == 40
    for epoch in shuffler.epochs(epochs):
        shares = shuffler.client.gather(epoch.map(share_of_first_half))
    return {"val_loss": abs(shares[0] - 0.5)}
"""


@pytest.mark.slow
def test_emulated_links_limit_an_exchange_and_are_said(elsewhere, url):
    result = run(url, "--links", "4mbit", "--store", "16mbit", "--workers", 2, "--epochs", 2, "--delivery", "peer")
    assert result.exit_code == 0, result.output
    words = "links of 4 Mbit/s into and out of each worker, and a store of 16 Mbit/s"
    assert " ".join(result.stderr.split()).startswith(f"Emulated: {words}. --links none --store none measures")
    assert f"Emulated: {words}. Medians of the epochs" in " ".join(result.stdout.split())
    folder = elsewhere / "dshuffle-report"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["emulated"] == words
    assert words in (folder / "report.html").read_text()
    _, exchanged = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert exchanged["exchange_seconds"] > max(exchanged["wire_sent_bytes"]) * 8 / 4e6


@pytest.mark.slow
def test_what_the_configuration_emulates_reaches_the_workers_and_is_said(elsewhere, url):
    """A rate of the command line replaces that of the configuration, and leaves the other one."""
    with dask.config.set({"dshuffle.emulated-links": "2mbit", "dshuffle.emulated-store": "8mbit"}):
        result = run(url, "--links", "16mbit", "--workers", 2, "--epochs", 2, "--delivery", "peer")
    assert result.exit_code == 0, result.output
    words = "links of 16 Mbit/s into and out of each worker, and a store of 16 Mbit/s"
    assert json.loads((elsewhere / "dshuffle-report" / "summary.json").read_text())["emulated"] == words


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
        (("--sharding", "yours"), "sharding='yours' is not allowed; it must be one of ['contiguous', 'random', "),
        (
            ("--sharding", "stratified:x"),
            "sharding='stratified:x' is not allowed; it must be 'stratified:' followed by one of [",
        ),
        (("--balance", "y"), "balance='y' is not allowed; it must be None, or one of ['label']"),
        (("--balance", "label", "--assignment", "aligned"), "balance='label' is not allowed"),
        (("--sharding", "mine", "--workers", 3), "--workers=3 is not allowed"),
    ],
)
def test_first_assignments_and_labels_are_checked_before_a_cluster_is_started(elsewhere, labelled, options, message):
    result = run(labelled, "--delivery", "peer", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_dataset_without_labels_has_no_balance(elsewhere, url):
    result = run(url, "--delivery", "peer", "--balance", "y")
    assert result.exit_code == 1
    assert "balance='y' is not allowed; it must be None. " in result.stderr
    assert "this dataset has none" in result.stderr


@pytest.mark.slow
def test_ways_with_fewer_exchanges_are_compared(elsewhere, url):
    options = ("--assignment", "global", "--assignment", "local", "--every", 1, "--every", 2, "--between", "reverse")
    result = run(url, "--workers", 2, "--epochs", 3, *options, "--json")
    assert result.exit_code == 0, result.output
    ways = json.loads(result.stdout)["ways"]
    assert [way["label"] for way in ways] == ["global + peer", "global + peer, every 2 epochs, reverse", "local"]
    always, sparse, _ = (way["figures"] for way in ways)
    assert sparse["wire_bytes"] == pytest.approx(always["wire_bytes"] / 2, rel=0.2)
    assert [way["pairs"] is None for way in ways] == [True, False, False], "compared with a new draw in every epoch"
    lines = (elsewhere / "dshuffle-report" / "records.jsonl").read_text().splitlines()
    exchanged = [record["exchanged"] for record in map(json.loads, lines) if record["way"] == ways[1]["label"]]
    assert exchanged == [False, False, True]


@pytest.mark.slow
def test_labels_are_ways_to_start(elsewhere, labelled):
    start = ("--sharding", "stratified:label", "--balance", "label")
    balanced = run(labelled, "--workers", 2, "--epochs", 2, "--assignment", "partial:0.5", *start)
    assert balanced.exit_code == 0, balanced.output
    assert "partial:0.5 + peer, balance: label" in balanced.stdout
    assert balanced.stderr.count("warning: balance='label': 1 of 3 classes") == 1
    [way] = json.loads((elsewhere / "dshuffle-report" / "summary.json").read_text())["ways"]
    assert (way["sharding"], way["balance"]) == ("stratified:label", "label")


@pytest.mark.slow
def test_a_running_scheduler_is_used(elsewhere, url):
    with local_cluster(2) as client:
        result = run(
            url, "--scheduler", client.scheduler.address, "--epochs", 2, "--delivery", "server", "--output", "out"
        )
        assert result.exit_code == 0, result.output
        assert client.status == "running"
    assert "global + server" in result.stdout
    record = json.loads((elsewhere / "out" / "records.jsonl").read_text().splitlines()[-1])
    assert (record["n_workers"], record["server"]) == (2, "dedicated")


@pytest.mark.slow
def test_a_step_that_diverges_is_one_line(elsewhere, url):
    result = run(url, "--workers", 2, "--epochs", 2, "--step", 1e6, "--delivery", "peer")
    assert result.exit_code == 1
    assert "Error: --step=1000000.0" in result.stderr
    assert "take a smaller step" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_default_run(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    result = run()
    assert result.exit_code == 0, result.output
    assert {"local, as stored", "local, shuffled once", "partial:0.1 + peer, from stored order"} <= {
        line.split("  ")[0] for line in result.stdout.splitlines()
    }
    text = " ".join(result.stdout.split())
    assert "“local, shuffled once” against reshuffling, in rmse: worse by" in text
    assert "“local, as stored” against reshuffling, in rmse: worse by" in text
    assert "rmse in pairs of runs" in text
    summary = json.loads((elsewhere / "dshuffle-report" / "summary.json").read_text())
    copies = {way["label"]: way["copy_seconds"] for way in summary["ways"]}
    assert copies.pop("chunks + storage, shuffled on disk") > 0
    assert {*copies.values()} == {None}
    assert summary["stored_at_random"] is False
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert not [name for name in left if name.startswith("dshuffle-")], "the generated dataset is removed"
    shutil.rmtree(elsewhere / "dshuffle-report")
    assert list(elsewhere.iterdir()) == []
