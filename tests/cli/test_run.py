"""`dshuffle run`: pipelines from files and modules."""

from __future__ import annotations

import json
import sys

import dask
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.cli.run import pipeline_of
from dshuffle.synthetic import keyed_regression

URL = "memory://test-run"

FILE = """
from dshuffle import Pipeline, Training
from dshuffle.pipeline import LocalWorkers

if __name__ == "__main__":
    raise SystemExit("a file must not run itself")


def count(partition):
    return len(partition)


def each(shuffler, *, epochs):
    return [shuffler.client.gather(epoch.map(count)) for epoch in shuffler.epochs(epochs)]


other = Pipeline("memory://test-run", Training(each, epochs=2), cluster=LocalWorkers(2, processes=False))
number = 5


def pipeline(url, epochs=2):
    training = Training("linear_regression", epochs=epochs, step=0.1)
    return Pipeline(url, training, cluster=LocalWorkers(2, processes=False))
"""


@pytest.fixture(scope="module", autouse=True)
def dataset():
    dshuffle.create_dataset(URL, keyed_regression(200, n_keys=5, n_dense=4), overwrite=True)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["run", *map(str, arguments)])


@pytest.mark.slow
def test_a_file_with_arguments(file, tmp_path):
    ran = run(file, f"url={URL}", "epochs=3", "--report", tmp_path / "report")
    assert ran.exit_code == 0, ran.output
    meaning, *lines = ran.stdout.splitlines()
    assert meaning == "The error is the relative residual ‖Xw - y‖ / ‖y‖ on the whole dataset."
    assert lines[0] == "global + peer, 2 workers"
    assert [line.split(":")[0] for line in lines[1:4]] == [
        f"  epoch {e} ({w})" for e, w in enumerate(["load", "peer", "peer"])
    ]
    assert all("error 0." in line for line in lines[1:4])
    assert lines[4] == f"Report: {tmp_path / 'report' / 'report.html'}"
    assert "4/7 global + peer" in ran.stderr


def test_json_lines_have_what_training_reported(file):
    ran = run(file, f"url={URL}", "epochs=2", "--json")
    assert ran.exit_code == 0, ran.output
    errors = [json.loads(line)["error"] for line in ran.stdout.splitlines()]
    assert len(errors) == 2
    assert 0 < errors[1] < errors[0] < 1


REPORTS = """
from dshuffle.report import TrainingPoint
from dshuffle.training import History


def reports(shuffler, *, epochs, last):
    each(shuffler, epochs=epochs)
    errors = enumerate([float("nan"), last])
    return History(tuple(TrainingPoint(epoch=epoch, seconds=1.0, error=error) for epoch, error in errors), None)


def reported(last):
    training = Training(reports, epochs=2, last=last)
    return Pipeline("memory://test-run", training, cluster=LocalWorkers(2, processes=False))
"""


@pytest.mark.parametrize(
    ("last", "heading", "error"), [("NaN", [], []), ("0.5", ["The error is the"], ["error 0.500"])]
)
def test_errors_that_training_did_not_report_are_not_printed(file, last, heading, error):
    file.write_text(FILE + REPORTS)
    ran = run(f"{file}:reported", f"last={last}")
    assert ran.exit_code == 0, ran.output
    *headings, _, first, second = ran.stdout.splitlines()
    assert [line[:16] for line in headings] == heading
    assert "error" not in first
    assert second.split(", ")[3:] == error


def test_functions_of_the_file_run_on_workers(file):
    ran = run(f"{file}:other", "--json")
    assert ran.exit_code == 0, ran.output
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(record["way"], record["epoch"]) for record in records] == [("global + peer", 0), ("global + peer", 1)]


def test_a_file_and_a_module_find_what_is_beside_them(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text(FILE)
    (tmp_path / "uses.py").write_text("from beside import other as pipeline")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir("/")
    assert pipeline_of(str(tmp_path / "uses.py"), {}).ways
    monkeypatch.setattr("sys.path", [one for one in sys.path if one != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "beside")
    monkeypatch.chdir(tmp_path)
    assert pipeline_of("beside:other", {}).ways
    monkeypatch.delitem(sys.modules, "beside")


def test_shares_for_all_ways(file):
    ran = run(f"{file}:other", "--shares", "3,1")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[3] == "  shares: 75.0 % (rank 0), 25.0 % (rank 1)"
    ran = run(f"{file}:other", "--shares", "measured")
    assert "  shares: equal, because 2 epochs are too few to measure them; 5 are needed" in ran.stdout.splitlines()
    ran = run(f"{file}:other", "--shares", "3,1", "--json")
    assert ran.exit_code == 0, ran.output
    records = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [record["weights"] for record in records] == [[1000, 333]] * 2
    assert {record["choices"]["shares"] for record in records} == {"3,1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "TARGET='nothing.py' is not allowed; it must be FILE.py"),
        (["not_a_module_at_all:x"], "No module named 'not_a_module_at_all'"),
        ([":x"], "TARGET=':x' is not allowed"),
        (["{file}:nothing"], "has no name 'nothing'. It has the pipelines other."),
        (["{file}:number"], "is 5 and not a dshuffle.Pipeline"),
        (["{file}"], "missing a required argument: 'url' of pipeline in"),
        (["{file}", "path=x"], "missing a required argument: 'url'"),
        (["{file}", "url"], "argument='url' is not allowed; it must be of the form NAME=VALUE"),
        (["{file}:other", "a=1"], "other in"),
        (["{file}", "url=memory://nowhere"], "memory://nowhere"),
        (
            ["{file}:other", "--shares", "1,2,3"],
            "cannot run: global + peer: shares='1,2,3' is not allowed; it must be 2",
        ),
        (["{file}:other", "--shares", "fast"], "--shares='fast' is not allowed; it must be 'even', 'measured', posi"),
        (["{file}:other", "--scheduler", "tcp://127.0.0.1:1"], "no Dask scheduler answers at 'tcp://127.0.0.1:1'"),
    ],
)
def test_what_cannot_run(file, arguments, message):
    with dask.config.set({"distributed.comm.timeouts.connect": "500ms"}):
        ran = run(*(argument.replace("{file}", str(file)) for argument in arguments))
    assert ran.exit_code != 0
    assert ran.stderr.strip().splitlines()[-1].startswith("Error: ")
    assert message in ran.stderr


def test_the_command_line_chooses_the_members(file):
    assert "global + peer, 1 workers" in run(f"{file}:other", "--workers", "1").stdout.splitlines()
    refused = run(f"{file}:other", "--workers", "0,7")
    assert refused.exit_code == 1
    assert "--workers=['0', '7'] is not allowed; it must be a list of addresses or names" in refused.output


@pytest.mark.slow
def test_a_run_that_goes_on_says_from_where(file, tmp_path):
    state = tmp_path / "state.json"
    text = f"""

def resumed(epochs):
    training = Training("linear_regression", epochs, step=0.1)
    return Pipeline("{URL}", training, cluster=LocalWorkers(2, processes=False), checkpoint="{state}")
"""
    file.write_text(FILE + text)
    assert "goes on" not in run(f"{file}:resumed", "epochs=2").output
    ran = run(f"{file}:resumed", "epochs=3")
    words = f"training goes on with epoch 2, after 2 of 3, from the checkpoint {state}"
    assert words.replace(" ", "") in "".join(ran.stderr.split())
