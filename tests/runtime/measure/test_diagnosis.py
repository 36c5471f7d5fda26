"""What `dshuffle doctor` finds, and what it says about it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import dask
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.runtime.measure import measurement as diagnosis
from dshuffle.runtime.measure.measurement import diagnose, look_at_process, of_links

A, B = "tcp://a:1", "tcp://b:1"


@dataclasses.dataclass
class StubClient:
    """A client whose workers answer what they are told to."""

    workers: dict
    scheduler: dict

    def sync(self, function, *args):
        return asyncio.run(function(*args))

    async def _run(self, function, *args, workers, on_error):
        assert (workers, on_error) == (None, "return")
        return self.workers

    async def _run_on_scheduler(self, function):
        if isinstance(self.scheduler, Exception):
            raise self.scheduler
        return self.scheduler


@pytest.fixture
def client(monkeypatch):
    """A client of a healthy cluster."""
    monkeypatch.setattr(diagnosis.resource, "getrlimit", lambda _: (10**5, 10**5))
    process = look_at_process()
    facts = copy.deepcopy(process) | {
        "dataset_error": "",
        "trains": True,
        "memory": 10**8,
        "memory_limit": 10**9,
        "open_files": 1000,  # a worker raises its limit
    }
    monkeypatch.setattr(diagnosis, "CLOCKS", 60.0)  # the facts are as old as the test
    workers = {where: {"host": where, "resources": {}, "status": "running"} for where in (A, B)}
    monkeypatch.setattr(diagnosis, "cluster_info", lambda _: {"workers": workers})
    return StubClient({A: facts, B: copy.deepcopy(facts)}, process)


def found(client, level, dataset=None):
    return [(one.subject, one.observation, one.remedy) for one in diagnose(client, dataset) if one.level == level]


def test_a_healthy_cluster(client):
    assert {one.level for one in diagnose(client)} == {"ok"}


@pytest.mark.parametrize(
    ("fact", "value", "level", "subject", "words"),
    [
        ("most_open_files", 100, "warning", "open files", f"2 workers need 1024, and few are allowed: {B} 100"),
        ("memory", 9 * 10**8, "warning", "memory", f"little is left: {B} uses 900 MB of 1.00 GB"),
        ("clock", 0.0, "warning", "clocks", f"differ from the client's: {B} by "),
    ],
)
def test_what_is_wrong_on_one_worker(client, fact, value, level, subject, words):
    client.workers[B][fact] = value
    [(name, text, remedy)] = found(client, level)
    assert name == subject
    assert words in text
    assert remedy


def test_partitions_that_do_not_fit(client, small):
    needed = 2 * small.n_samples // 2 * (small.row_nbytes + 28)
    assert any(text.startswith("a partition takes ") for _, text, _ in found(client, "ok", small))
    client.workers[B]["memory_limit"] = needed
    client.workers[B]["memory"] = 0
    [(_, text, remedy)] = found(client, "warning", small)
    assert text.startswith("a partition takes ")
    assert "Use more workers, a larger memory limit, or a cache_directory." in remedy
    client.workers[B]["trains"] = False  # a server needs no partition
    assert not found(client, "warning", small)


@pytest.mark.slow
def test_links_are_measured(threads, small, monkeypatch):
    links = of_links(threads, small, seconds=0.5)
    assert links.level == "ok"
    assert "from another one, and" in links.observation
    monkeypatch.setattr("dshuffle.runtime.measure.measurement.SLOW_LINK", 1e15)
    assert "interface=" in of_links(threads, small, seconds=0.5).remedy


def test_processes_without_dshuffle(client):
    client.workers[B] = ModuleNotFoundError("No module named 'dshuffle'")
    client.scheduler = ModuleNotFoundError("No module named 'dshuffle'")
    errors = found(client, "error")
    assert [text.split(": ")[0] for _, text, _ in errors] == [B, "scheduler"]
    assert all("same version of dshuffle" in remedy for *_, remedy in errors)


def test_a_real_cluster(threads, small, tmp_path):
    findings = diagnose(threads, small)
    assert {one.subject for one in findings} >= {"workers", "versions", "clocks", "open files", "dataset"}
    assert not [one for one in findings if one.level == "error"]
    gone = dshuffle.create_dataset(tmp_path / "d.zarr", {"x": [1.0, 2.0]})
    path = tmp_path / "d.zarr" / "zarr.json"
    path.rename(tmp_path / "moved")
    with pytest.raises(dshuffle.DatasetError):  # the client itself does not see it any more
        diagnose(threads, gone)


@pytest.mark.slow
def test_the_command(tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": [1.0, 2.0]})
    ran = CliRunner().invoke(main, ["doctor", str(tmp_path / "d.zarr")])
    findings = [line.split() for line in ran.stdout.splitlines() if line.split()[0] in ("ok", "warning", "error")]
    assert {words[1] for words in findings} >= {"workers:", "versions:", "dataset:", "links:"}
    assert ran.exit_code == any(words[0] == "error" for words in findings)
    with dask.config.set({"distributed.comm.timeouts.connect": "500ms"}):
        ran = CliRunner().invoke(main, ["doctor", "--scheduler", "tcp://127.0.0.1:1"])
    assert ran.exit_code == 1
    assert "no Dask scheduler answers" in ran.stderr
