"""`dshuffle plan`: figures without a cluster."""

import itertools
import json

import numpy as np
import pytest
from click.testing import CliRunner

from dshuffle.cli import main
from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *arguments])


def test_json_has_a_row_for_each_delivery():
    ran = run("--samples", "20000", "--workers", "8", "--cache-fraction", "0.3", "--json")
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    rows = {row["name"]: row for row in figures["deliveries"]}
    assert list(rows) == ["server", "clique", "ubershuffle", "coded"]
    assert rows["server"]["packets"] == rows["server"]["needed"]
    assert rows["clique"]["packets"] <= rows["ubershuffle"]["packets"] < rows["coded"]["packets"]
    for row in rows.values():
        assert row["lower_bound"] <= row["packets"] <= row["needed"]
        assert row["theorem2"] == pytest.approx(row["average_bound"], rel=0.05)
        assert row["coded_load_bytes"] == 1024 * row["packets"]
        assert row["plan_seconds"] > 0


def test_there_is_no_exact_bound_beyond_its_limit():
    ran = run("--samples", "2000", "--workers", "24", "--cache-fraction", "0.2", "--delivery", "clique", "--json")
    [row] = json.loads(ran.stdout)["deliveries"]
    assert row["lower_bound"] is None
    assert row["average_bound"] <= row["packets"]


def test_aligned_needs_fewer_packets_than_any_code_on_a_uniform_draw():
    uniform = run("--samples", "20000", "--workers", "10", "--cache-fraction", "0.2", "--json")
    aligned = run(
        *("--samples", "20000", "--workers", "10", "--cache-fraction", "0.2", "--json", "--epochs", "4"),
        *("--assignment", "aligned", "--caching", "even"),
    )
    bound = json.loads(uniform.stdout)["deliveries"][0]["lower_bound"]
    packets = {row["name"]: row["packets"] for row in json.loads(aligned.stdout)["deliveries"]}
    assert packets["clique"] < bound


def test_chunks_can_be_planned_without_a_dataset():
    ran = run("--samples", "4096", "--workers", "4", "--assignment", "chunks:64", "--cache-fraction", "0.5", "--json")
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    assert figures["assignment"] == "chunks:64"
    rows = {row["name"]: row for row in figures["deliveries"]}
    assert rows["clique"]["packets"] < rows["server"]["packets"] == rows["server"]["needed"]


def test_the_table_names_all(request):
    ran = run("--samples", "3000", "--workers", "4")
    assert ran.exit_code == 0
    for word in ("server", "leftover", "clique", "lower bound", "Theorem 2"):
        assert word in ran.output


def test_groups_of_rows_may_be_more_than_compiling_needs():
    ran = run("--samples", "10000", "--workers", "8", "--assignment", "chunks:50")
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--samples", "3", "--workers", "4"), "fewer samples than workers"),
        (("--samples", "100", "--workers", "4", "--cache-fraction", "2"), "--cache-fraction=2.0"),
        (("--samples", "100", "--workers", "4", "--assignment", "best"), "assignment='best'"),
        (("--samples", "100", "--workers", "4", "--assignment", "chunks"), "'chunks:ROWS'"),
        (("--samples", "100", "--workers", "4", "--assignment", "chunks:50"), "chunk_rows=50"),
        (("--samples", "100", "--workers", "4", "--cache-fraction", "0.5", "--delivery", "leftover"), "clique"),
        (("--samples", "1000", "--workers", "70", "--cache-fraction", "0.5", "--delivery", "coded"), "at most 64"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, told):
    ran = run(*arguments)
    assert ran.exit_code == 1
    assert told in ran.output
    assert "Traceback" not in ran.output


@pytest.mark.parametrize(
    ("assignment", "planned"), [("global", "alone"), ("partial:0.5", "alone"), ("aligned", "for all workers")]
)
def test_one_workers_part_is_shown_and_its_ids_are_written(tmp_path, assignment, planned):
    orders, received, sent = [], [], []
    for rank in range(4):
        ids = tmp_path / f"{rank}.npy"
        arguments = ["plan", "--samples=1001", "--workers=4", f"--assignment={assignment}", f"--own-part={rank}"]
        ran = CliRunner().invoke(main, [*arguments, "--epoch=3", "--seed=5", f"--ids={ids}", "--json"])
        assert ran.exit_code == 0, ran.output
        found = json.loads(ran.stdout)
        assert found["planned"] == planned
        orders.append(np.load(ids).tolist())
        assert found["rows"] == len(orders[-1])
        received.append(found["received"])
        sent.append(found["sent"])
    assert sorted(itertools.chain(*orders)) == list(range(1001))
    assert np.array_equal(np.transpose(received), sent), "both ends of a pair agree"
    spec = ShuffleSpec(1001, 4, Choices(assignment, seed=5))
    planner = EpochPlanner(spec)
    planner.load()
    for _ in range(3):
        plan = planner.advance()
    assert orders == [plan.for_worker(rank).order.tolist() for rank in range(4)]


def test_the_part_of_a_huge_job_costs_next_to_nothing():
    ran = CliRunner().invoke(main, ["plan", "--samples=1000000000", "--workers=4096", "--own-part=7", "--json"])
    found = json.loads(ran.stdout)
    assert found["processor_seconds"] < 1.2  # three times the bound of 0.4
    assert found["extra_bytes"] < 200e6
    assert sum(found["received"]) > 240_000
    assert found["received"][7] == found["sent"][7] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--own-part=4"], r"--own-part=4 is not allowed; it must be in [0, 4)"),
        (["--own-part=0", "--ids=/no/such/folder/x.npy"], "ids='/no/such/folder/x.npy' is not allowed"),
        (["--ids=x.npy"], "--ids needs --own-part"),
        (["--own-part=0", "--samples=9000000000000000000"], "samples=9000000000000000000 is not allowed"),
        (["--samples=9000000000000000000"], "samples=9000000000000000000 is not allowed; it must be at most"),
    ],
)
def test_a_part_that_cannot_be_shown_is_refused(options, message):
    ran = CliRunner().invoke(main, ["plan", "--samples=100", "--workers=4", *options])
    assert ran.exit_code != 0
    assert message in " ".join(ran.output.split())
