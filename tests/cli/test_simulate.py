"""`dshuffle simulate`: predictions for clusters that one does not have."""

import json

import pytest
from click.testing import CliRunner

from dshuffle.cli import main

JOB = ("--workers", "8", "--samples", "20000", "--cache-fraction", "0.5")


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", *arguments])


@pytest.fixture
def profiles(tmp_path):
    path = tmp_path / "profiles.toml"
    path.write_text(
        '[slow]\nlink_bytes_per_second = 12.5e6\nsource = "a book"\n'
        "[stores.fast]\nstorage_bytes_per_second = 5e9\nrequest_seconds = 0.01\n"
        "[broken]\nlink_bytes_per_second = -3\n"
    )
    return path


def test_json_has_all_ways_and_the_recommendation():
    ran = run(*JOB, "--bandwidth", "100mbit", "--storage-bandwidth", "100MB/s", "--json")
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.output)
    assert answer["cluster"]["link_up"] == 12.5e6
    ways = {row["way"]: row for row in answer["ways"]}
    assert {"local", "partial:0.1 + peer", "global + storage", "chunks + storage"} < set(ways)
    peer = ways["global + peer"]
    assert peer["exchange_seconds"] == pytest.approx(peer["most_ingress"] / 12.5e6 * 1.046, rel=0.05)
    assert ways["global + server"]["exchange_seconds"] > 6 * peer["exchange_seconds"]
    assert answer["recommendation"]["way"] == "global + peer"
    assert answer["recommendation"]["instead"] is None


def test_the_table_fits_a_terminal_and_says_what_to_do():
    ran = run(*JOB, "--bandwidth", "100mbit", "--storage-bandwidth", "100MB/s", "--training", "0.05")
    assert ran.exit_code == 0
    assert max(map(len, ran.output.splitlines())) <= 80
    for words in ("clique, pipelined", "Do not shuffle globally", "whatever the code", "What would change this"):
        assert words in " ".join(ran.output.split())


def test_profiles_are_taken_together(profiles):
    ran = run(*JOB, "--profile", f"{profiles}#slow", "--profile", f"{profiles}#fast", "--json")
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.output)
    cluster = answer["cluster"]
    assert (cluster["link_down"], cluster["storage"], cluster["request_seconds"]) == (12.5e6, 5e9, 0.01)
    assert answer["sources"] == ["slow: a book"]
    other = run(*JOB, "--profile", f"{profiles}#slow", "--bandwidth", "1GB/s", "--json")
    assert json.loads(other.output)["cluster"]["link_up"] == 1e9


def test_a_job_of_any_size():
    job = ("--workers", "4096", "--samples", "1000000000", "--row-bytes", "4096")
    ran = run(*job, "--bandwidth", "100gbit", "--storage-bandwidth", "1TB/s", "--json")
    assert ran.exit_code == 0, ran.output
    assert not any(row["exact"] for row in json.loads(ran.output)["ways"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--bandwidth or --profile is needed"),
        (("--bandwidth", "fast"), "bandwidth='fast'"),
        (("--bandwidth", "0"), "bandwidth='0'"),
        (("--bandwidth", "1e6", "--assignment", "local"), "at least one with the assignment 'global'"),
        (("--bandwidth", "1e6", "--cache-fraction", "2"), "cache_fraction=2.0"),
        (("--profile", "{}#fast"), "#fast' is not allowed; it must be one with 'link_bytes_per_second'"),
        (("--profile", "{}#none"), "one of broken, fast, slow"),
        (("--profile", "{}#broken"), "link_bytes_per_second=-3"),
        (("--profile", "nowhere.toml#fast"), "nowhere.toml"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, told, profiles):
    ran = run(*JOB, *(argument.format(profiles) for argument in arguments))
    assert ran.exit_code in (1, 2)
    assert told in ran.output
    assert "Traceback" not in ran.output
