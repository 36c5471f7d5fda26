"""Benchmarks can be imported, and what does not depend on other programs of the machine holds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]  # workers cannot import it, so its functions are sent to them
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_benchmark_can_be_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    try:
        module = load(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("dshuffle", "tests")):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert module.__doc__


@pytest.mark.slow
def test_a_large_epoch_is_planned_in_half_a_second():
    assert load("promises").planning_seconds() < 0.5


@pytest.mark.slow
def test_digests_take_little_of_planning():
    assert load("promises").digest_fraction(10**7) < 0.03


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


@pytest.mark.slow
def test_measured_shares_are_faster_than_equal_ones():
    results = load("unequal_workers").main(["--workers=3", "--rows=3000", "--seconds=0.8"])
    assert results["ideal"] <= results["measured"] < 0.8 * results["even"]


@pytest.mark.slow
def test_a_smaller_share_relieves_a_slow_link():
    results = load("slow_link").main(["--workers=3", "--rows=2000", "--link=3mbit"])
    assert 0 < results["smaller"] < results["even"]


def test_what_a_comparison_of_revisions_says():
    revisions = load("revisions")
    rounds = [1.0, 1.1, 0.9, 1.0, 1.05]
    before = [{"plan": 1.0, "exchange": one, "tasks": 1.0} for one in rounds]
    after = [{"plan": 0.5, "exchange": 1.0, "tasks": 1.2} for _ in rounds]
    verdicts = {row[0]: row[-1] for row in revisions.compared(before, after)}
    assert verdicts == {"plan": "faster", "exchange": "", "tasks": "slower"}


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
