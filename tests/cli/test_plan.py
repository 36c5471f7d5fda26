"""`dshuffle plan`: figures without a cluster."""

import json

import pytest
from click.testing import CliRunner

from dshuffle.cli import main


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
        assert row["plan_seconds"] >= 0


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
        (("--samples", "100", "--workers", "4", "--cache-fraction", "2"), "cache_fraction=2.0"),
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
