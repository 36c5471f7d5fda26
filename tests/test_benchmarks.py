"""The benchmarks run, and the promise that does not depend on what else the machine does is kept."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dshuffle

BENCHMARKS = Path(__file__).parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_large_epoch_is_planned_in_half_a_second():
    assert load("promises").planning_seconds() < 0.5


@pytest.mark.slow
def test_digests_take_a_hundredth_of_planning():
    assert load("promises").digest_fraction(10**7) < 0.01


@pytest.mark.slow
def test_the_exchange_benchmark_runs():
    command = [sys.executable, str(BENCHMARKS / "exchange.py"), "--samples=2000", "--workers=2", "--repeats=1"]
    ran = subprocess.run([*command, "--skip=array"], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout.splitlines()[-1])
    assert set(results) == {"ours", "bare", "dataframe P2P"}
    assert results["ours"]["wire_bytes"] > 0
    assert all(result["seconds"] > 0 for result in results.values())


@pytest.mark.slow
def test_the_benchmark_of_many_workers_runs():
    results = load("many_workers").main(["--workers=3", "--epochs=1"])
    assert set(results) == {"first session", "local", "global", "tasks alone"}
    assert all(seconds > 0 for result in results.values() for seconds in result.values())


@pytest.mark.slow
def test_what_a_session_costs_the_scheduler_grows_with_its_members():
    """In processor time, of which there is room, and in memory and messages, which do not depend on the machine."""
    scheduler = load("scheduler")
    results = scheduler.main(["--members=128", "--members=512", "--epochs=2"])
    small, large = results["128"], results["512"]
    assert set(small) == {"open", "epoch", "orders", "signs", "loss", "close"}
    for name, phase in large.items():
        assert 0 < phase["peak_bytes"] < 4 * 1.4 * small[name]["peak_bytes"]
        assert phase["largest_bytes"] < scheduler.LARGEST_MESSAGE / 8  # it may be 1 MB with eight times as many
        assert phase["seconds"] > 0
    assert large["epoch"]["seconds"] < scheduler.MEMBER_SECONDS * 512 + scheduler.EPOCH_SECONDS


def test_the_coding_benchmark_runs():
    results = load("coding").main(["--row-bytes=64", "--row-bytes=803", "--components=3", "--mib=1", "--repeats=1"])
    assert set(results) == {64, 803}
    for speeds in results.values():
        assert set(speeds) == {"encode", "decode"}
        for each in speeds.values():
            assert min(each[way] for way in ("ours", "plain", "batched", "one by one")) > 0


def test_the_reading_benchmark_runs():
    pytest.importorskip("obstore", reason="obstore is not installed")
    results = load("reading").main(["--chunk-kib=64", "--mib=1", "--repeats=1"])
    assert set(results) == {"64 KiB", "64 KiB, zstd"}
    for result in results.values():
        assert {"bare", "ours", "zarr"} <= set(result["MB/s"])
        assert min(result["MB/s"].values()) > 0


def test_the_benchmark_of_columns_runs():
    results = load("columns").main(["--rows=500", "--columns=20", "--repeats=1"])
    assert set(results) == {"matrix", "columns", "ratio"}
    for figures in results.values():
        assert set(figures) == {"create", "open", "read", "some", "create, open, read"}
        assert min(figures.values()) > 0


@pytest.mark.slow
def test_measured_shares_are_faster_than_equal_ones():
    results = load("unequal_workers").main(["--workers=3", "--rows=3000", "--seconds=0.8"])
    assert results["ideal"] <= results["measured"] < 0.8 * results["even"]


@pytest.mark.slow
def test_a_smaller_share_relieves_a_slow_link():
    results = load("slow_link").main(["--workers=3", "--rows=2000", "--link=3mbit"])
    assert 0 < results["smaller"] < results["even"]


@pytest.mark.slow
def test_two_revisions_are_compared(tmp_path):
    """Each by its own package, although this one is installed."""
    revisions = load("revisions")
    copy = tmp_path / "dshuffle"
    shutil.copytree(Path(dshuffle.__file__).parent, copy)
    with (copy / "planning" / "own_part.py").open("a") as file:
        file.write("OwnPlanner.plan = lambda self, epoch, delivery: __import__('time').sleep(0.3)\n")
    here = [revisions.measure(Path(dshuffle.__file__).parents[1], ["plan: global", "kernels"]) for _ in range(2)]
    there = [revisions.measure(tmp_path, ["plan: global", "kernels"]) for _ in range(2)]
    assert min(one["plan: global"] for one in there) >= 0.3
    [plan, *kernels] = revisions.compared(here, there)
    assert plan[0] == "plan: global"
    assert plan[-1] == "slower"
    assert len(kernels) == 3


def test_what_a_comparison_of_revisions_says():
    revisions = load("revisions")
    rounds = [1.0, 1.1, 0.9, 1.0, 1.05]
    before = [{"plan": 1.0, "exchange": one, "tasks": 1.0} for one in rounds]
    after = [{"plan": 0.5, "exchange": 1.0, "tasks": 1.2} for _ in rounds]
    verdicts = {row[0]: row[-1] for row in revisions.compared(before, after)}
    assert verdicts == {"plan": "faster", "exchange": "", "tasks": "slower"}


@pytest.mark.slow
def test_the_suite_measures_every_part():
    suite = load("suite")
    assert all(seconds > 0 for seconds in suite.main(sorted(suite.SUITE)).values())


@pytest.mark.slow
def test_loaders_are_compared():
    command = [sys.executable, str(BENCHMARKS / "loaders.py"), "--samples=20000", "--workers=2", "--epochs=3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    title, _, *ways = ran.stdout.splitlines()
    assert title.startswith("20,000 rows, 20.5 MB, 2 processes")
    assert {way[:30].strip() for way in ways} == {
        "DistributedSampler on a file",
        *(f"dshuffle, {assignment}" for assignment in ("global", "partial:0.1", "chunks")),
    }


@pytest.mark.slow
def test_loaders_of_scripts_are_compared(torch):
    command = [sys.executable, str(BENCHMARKS / "launchers.py"), "--samples=1000", "--ranks=2", "--rounds=1", "--ways"]
    ways = ["DistributedSampler", "Dask session, global"]
    ran = subprocess.run([*command, *ways], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    title, _, size, _, *rows = ran.stdout.splitlines()
    assert "torch 2" in title
    assert size.startswith("1,000 images of 32x32x3 bytes, 2 ranks")
    assert [row[:22].strip() for row in rows] == ways
    assert all(row.endswith("  0, 0") for row in rows), "each sample comes once an epoch"


@pytest.mark.slow
def test_rules_that_change_q_are_compared_with_a_constant_one():
    command = [sys.executable, str(BENCHMARKS / "changing_q.py"), "--model=regression", "--rule=falling", "--pairs=2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split(", ")[1:3] for line in lines] == [
        ["constant steps", "random shards"],
        ["decaying steps", "random shards"],
        ["constant steps", "contiguous shards"],
        ["decaying steps", "contiguous shards"],
    ]
    fractions = [math.ceil(250 * (0.01 + (7 / 8 - 0.01) / 2**epoch)) / 250 for epoch in range(23)]
    assert all(f"mean Q {sum(fractions) / 23:.3f}" in line for line in lines)
    against_random = [float(line.split("from random shards ")[1].split("%")[0]) for line in lines[2:]]
    assert against_random[1] > 20, "with decaying steps, the last exchanges count most"


@pytest.mark.slow
def test_the_permute_benchmark_runs():
    command = [sys.executable, str(BENCHMARKS / "permute.py"), "--samples=2000", "--workers=2", "--repeats=1"]
    ran = subprocess.run([*command, "--chunks=4", "--skip=indexing"], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout.splitlines()[-1])
    assert set(results) == {"ours", "take", "dask.array.shuffle"}
    assert results["dask.array.shuffle"]["ratio"] > 0


@pytest.mark.slow
def test_a_worker_ends_soon_after_a_session():
    """In processor time, and beside workers that end as Python does by default, because the machine may be busy."""
    command = [sys.executable, str(BENCHMARKS / "exits.py"), "--samples=2000"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    results = {name: result["processor"] for name, result in json.loads(ran.stdout.splitlines()[-1]).items()}
    assert set(results) == {"plain Dask", "session", "permute", "collected"}
    assert results["plain Dask"] > 0
    middle = results["plain Dask"] + (results["collected"] - results["plain Dask"]) / 2
    assert 0 < results["session"] < middle
    assert 0 < results["permute"] < middle


@pytest.mark.slow
def test_the_benchmark_of_cold_starts_runs():
    command = [
        sys.executable,
        str(BENCHMARKS / "cold.py"),
        "--repeats=1",
        "--workers=1",
        "--only",
        "permute",
        "imports",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout.splitlines()[-1])
    assert {"first", "second", "first / second"} < set(results["permute"])
    assert all(figure > 0 for figure in results["permute"].values())
    assert 0 < results["imports"]["in memory"] < results["imports"]["dataset"]


@pytest.mark.slow
def test_the_training_benchmark_runs():
    command = [sys.executable, str(BENCHMARKS / "training.py"), "--samples=2000", "--features=7", "--epochs=2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    kernels = {"kernel", "kernel in stored order", "kernel beside"}
    assert set(result["rates"]) == set(result["of kernel"]) == kernels | {"local pass", "pass in fit", "fit"}
    assert min(result["rates"].values()) > 0
    assert result["local pass of kernel beside"] > 0


def test_those_that_need_slurm_can_be_imported():
    pytest.importorskip("dask_jobqueue", reason="dask-jobqueue is not installed")
    assert load("slurm").SCENES


@pytest.mark.parametrize("name", ["links", "predictions"])
def test_those_that_need_a_network_can_be_imported(name):
    assert callable(load(name).main)


@pytest.mark.slow
def test_nothing_is_lost_at_random_stops(capsys):
    load("random_stops").main(["--stops", "6", "--seed", "1"], standalone_mode=False)
    assert "10 stops in" in capsys.readouterr().out  # two trainings of five stops


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_chaos_strikes_real_workers():
    """On hosts with links, where the tests may make them."""
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), "--faults=2", "--workers=3"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split("|")[1:-1] for line in ran.stdout.splitlines() if line.startswith("| ")][1:]
    strikes = {name.strip(): int(times) for name, times, *_ in rows}
    assert sum(strikes.values()) == 2
    assert ("link of a worker cut, 3 s" in strikes) != ("no link is cut" in ran.stdout)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_needs_a_card_runs_on_a_cpu(torch):
    """`tests/gpu.sh` but for the card."""
    command = ["bash", str(BENCHMARKS.parent / "gpu.sh"), "--dry-run"]
    ran = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("images/s") == 6, ran.stdout
    assert ran.stdout.count("each once") == 2, ran.stdout
