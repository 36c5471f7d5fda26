"""`dshuffle advise` for clusters that its options describe."""

import json
import math
import tomllib

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.cli.advise import RATES, _described, shipped

pytestmark = pytest.mark.usefixtures("few_changes")
JOB = ("--workers", "8", "--samples", "4000", "--cache-fraction", "0.5")


def run(*arguments):
    return CliRunner().invoke(main, ["advise", *arguments])


@pytest.mark.slow
def test_an_assignment_that_these_caches_do_not_allow_is_told_of():
    job = ("--workers", "8", "--samples", "2000", "--bandwidth", "100mbit", "--assignment", "aligned")
    ran = run(*job)
    assert ran.exit_code == 0, ran.output
    assert "“aligned” is left out: it needs a --cache-fraction above 1/8" in ran.stderr
    ran = run(*job, "--cache-fraction", "0.3", "--assignment", "chunks:50", "--assignment", "chunks:100")
    assert "left out" not in ran.stderr
    assert all(f"\n{rule} + " in ran.stdout for rule in ("aligned", "chunks:50", "chunks:100"))


CONNECTION = {
    "storage_connection_bytes_per_second": 5e6,
    "storage_request_seconds": 0.01,
    "storage_requests_per_second": 500,
}


@pytest.fixture
def profiles(tmp_path):
    def table(name, **changes):
        rates = {key: 1e7 * (place + 1) for place, key in enumerate(RATES)} | changes
        lines = [f"{key} = {value}" for key, value in rates.items() if value is not None]
        return "\n".join([f"[{name}]", 'description = "in a book"', *lines, ""])

    path = tmp_path / "profiles.toml"
    path.write_text(
        table("good", storage_bytes_per_second="inf", **CONNECTION)
        + table("broken", link_up_bytes_per_second=-3)
        + table("endless", link_down_bytes_per_second="inf")
        + table("short", storage_request_seconds=None)
    )
    return path


def test_json_has_all_ways_and_the_recommendation():
    ran = run(*JOB, "--bandwidth", "100mbit", "--storage-bandwidth", "100MB/s", "--json")
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert answer["cluster"]["link_up"] == pytest.approx(12.5e6 / 1.046)
    ways = {row["way"]: row for row in answer["ways"]}
    assert {"local", "partial:0.1 + peer", "global + storage", "chunks + storage"} < set(ways)
    peer = ways["global + peer"]
    assert peer["exchange_seconds"] == pytest.approx(peer["most_ingress"] / 12.5e6 * 1.046, rel=0.05)
    assert ways["global + server"]["exchange_seconds"] > 6 * peer["exchange_seconds"]
    assert answer["recommendation"]["way"] == "global + peer"
    assert answer["recommendation"]["instead"] is None


def test_the_table_fits_a_terminal_and_says_what_to_do():
    ran = run(*JOB, "--bandwidth", "100mbit", "--storage-bandwidth", "100MB/s", "--training", "0.01")
    assert ran.exit_code == 0
    assert max(map(len, ran.stdout.splitlines())) <= 80
    for words in ("chunks + storage", "Do not shuffle globally", "peer: worker ingress of", "What would change this"):
        assert words in " ".join(ran.output.split())


def test_a_profile_gives_the_rates_and_options_go_before(profiles):
    job = (*JOB, "--assignment", "global")
    ran = run(*job, "--profile", f"{profiles}#good", "--json")
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    cluster = answer["cluster"]
    assert (cluster["link_up"], cluster["link_down"], cluster["server_up"]) == (1e7, 2e7, 3e7)
    assert (cluster["storage"], cluster["request_seconds"], cluster["storage_requests"]) == (None, 0.01, 500)
    assert answer["profile"]["description"] == "in a book"
    storage = next(row for row in answer["ways"] if row["way"] == "global + storage")
    waiting = storage["requests"] / 8 * (0.01 + 64 * 1024 / 5e6) / 64
    assert storage["resources"]["storage requests"] == pytest.approx(max(waiting, storage["requests"] / 500), rel=0.05)
    other = run(*job, "--profile", f"{profiles}#good", "--bandwidth", "1GB/s", "--json")
    assert json.loads(other.stdout)["cluster"]["link_up"] == pytest.approx(1e9 / 1.046)
    shown = run(*job, "--profile", f"{profiles}#good").stdout
    assert " ".join(shown.split()).startswith(f"{profiles}#good: in a book")


@pytest.mark.skipif(not shipped().exists(), reason="storage/profiles.toml is not here")
def test_all_profiles_that_come_along_can_be_used():
    for name in tomllib.loads(shipped().read_text()):
        cluster, facts, text = _described(name, 4, None, None, None)
        assert cluster.link_up > 0
        assert text.startswith(f"{name}: {facts['profile']['description']}")


def test_a_dataset_says_how_many_samples_there_are_and_how_long(tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.zeros((500, 32)), "y": np.zeros(500)}, chunk_rows=64)
    rates = ("--bandwidth", "1gbit", "--storage-bandwidth", "1gbit")
    cluster = ("--workers", "4", *rates, "--assignment", "global", "--json")
    counted = CliRunner().invoke(main, ["advise", "--samples", "500", "--row-bytes", str(33 * 8), *cluster])
    opened = CliRunner().invoke(main, ["advise", str(tmp_path / "d.zarr"), *cluster])
    assert opened.exit_code == 0, opened.output
    assert json.loads(opened.stdout) == json.loads(counted.stdout)
    refused = CliRunner().invoke(main, ["advise", str(tmp_path / "d.zarr"), *cluster, "--row-bytes", "8"])
    assert refused.exit_code == 2
    assert "--row-bytes cannot be used with DATASET" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--samples 9", "Name a cluster to measure with --scheduler, or describe one with --workers"),
        ("--samples 9 --bandwidth 1gbit", "describe one with --workers"),
        ("--workers 4 --bandwidth 1gbit", "DATASET or --samples is required."),
        ("--samples 9 --scheduler tcp://x:1 --profile s3", "--profile cannot be used with --scheduler"),
        ("--samples 9 --scheduler tcp://x:1 --workers 1", "--workers cannot be used with --scheduler"),
        ("--egress-price -1", "--egress-price"),
    ],
)
def test_options_that_do_not_belong_together(arguments, message):
    ran = run(*arguments.split())
    assert ran.exit_code == 2
    assert message in ran.stderr


@pytest.mark.slow
def test_a_job_of_any_size():
    job = ("--workers", "4096", "--samples", "1000000000", "--row-bytes", "4096")
    ran = run(*job, "--bandwidth", "100gbit", "--storage-bandwidth", "1TB/s", "--json")
    assert ran.exit_code == 0, ran.output
    assert not any(row["exact"] for row in json.loads(ran.stdout)["ways"])


def test_what_is_asked_for_is_weighed_against_a_global_shuffle():
    ran = run(*JOB, "--bandwidth", "1MB", "--assignment", "partial:0.2", "--json")
    assert ran.exit_code == 0, ran.output
    assert {row["assignment"] for row in json.loads(ran.stdout)["ways"]} == {"partial:0.2", "global"}
    for fraction, there in (("0.6", {"aligned", "global"}), ("0.125", {"global"})):
        ran = run(*JOB, "--bandwidth", "1MB", "--assignment", "aligned", "--cache-fraction", fraction, "--json")
        assert {row["assignment"] for row in json.loads(ran.stdout)["ways"]} == there


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "either --bandwidth or --profile"),
        (("--bandwidth", "fast"), "bandwidth='fast'"),
        (("--bandwidth", "0"), "bandwidth='0'"),
        (("--bandwidth", "1MB", "--cache-fraction", "2"), "--cache-fraction=2.0"),
        (("--profile", "{}#none"), "none cannot be read: 'none'. It must be in"),
        (("--profile", "{}#short"), "cannot be read: 'storage_request_seconds'"),
        (("--profile", "{}#broken"), "link_up=-3"),
        (("--profile", "{}#endless"), "a rate > 0, which is finite for links"),
        (("--profile", "nowhere.toml#fast"), "nowhere.toml"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, told, profiles):
    ran = run(*JOB, *(argument.format(profiles) for argument in arguments))
    assert ran.exit_code in (1, 2)
    assert told in ran.output
    assert "Traceback" not in ran.output


PRICED = (*JOB, "--bandwidth", "100mbit", "--storage-bandwidth", "100MB/s", "--egress-price", "0.09")


def test_prices_of_all_ways_are_shown_beside_their_seconds():
    ran = run(*PRICED)
    assert ran.exit_code == 0, ran.output
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "price     price\nstrategy" in ran.stdout
    assert "of load  of epoch" in ran.stdout


def test_packets_are_counted_beside_a_bound_for_any_code():
    """Theorem 2 of Chung et al. (2017) for 8 workers that hold a half: computed by hand from its sum."""
    answer = json.loads(run(*JOB, "--bandwidth", "100mbit", "--json").stdout)
    packets = {row["way"]: row["packets"] for row in answer["ways"]}
    p = (0.5 - 1 / 8) / (1 - 1 / 8)
    sets = [math.comb(8, size) * p ** (size - 2) * (1 - p) ** (8 - size + 1) * (size - 1) for size in range(2, 9)]
    assert answer["lower_bound"] == pytest.approx(4000 / 64 * sum(sets))
    assert packets["global + server"] == pytest.approx(2000, rel=0.03)
    assert 0.97 * answer["lower_bound"] < packets["global + clique, pipelined"] < packets["global + coded, pipelined"]
    assert packets["aligned + clique, pipelined"] < packets["global + clique, pipelined"]
    shown = " ".join(run(*JOB, "--bandwidth", "100mbit").stdout.split())
    assert f"no code needs fewer than {answer['lower_bound']:,.0f} packets on average" in shown
    assert f"{packets['global + clique, pipelined']:,.0f}" in shown


@pytest.mark.slow
def test_prices_in_json():
    priced, plain = (json.loads(run(*options, "--json").stdout)["ways"] for options in (PRICED, PRICED[:-2]))
    ways = {row["way"]: row for row in priced}
    assert ways["global + peer"]["price_of_epoch"] == 0, "only what leaves the store and the server has a price"
    read = ways["global + storage"]
    assert read["price_of_epoch"] == pytest.approx(0.09 * read["storage_bytes"] / 1e9)
    assert not any("price_of_epoch" in row for row in plain)
