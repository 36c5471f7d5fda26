"""Who may connect to the ranks of a job: nobody from other hosts, or who knows the secret."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client, Scheduler

from dshuffle.errors import ClusterError
from dshuffle.launched.job import Job
from dshuffle.launched.launcher import Place
from dshuffle.launched.ports import find_scheduler
from dshuffle.launched.secret import LEAST_LENGTH, PROTOCOL, VARIABLE, OtherSecret, SecretSecurity, key_of


@pytest.fixture
def outer_address():
    """An address of this host that other hosts may reach."""
    for listed in psutil.net_if_addrs().values():
        for address in listed:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this host has no other address")


LISTENS = """
import os, sys
import psutil
import dshuffle

with dshuffle.spmd(sys.argv[1], batch_size=8) as loader:
    assert sum(len(ids) for ids, _ in next(loader.epochs(1))) in (51, 52)
    connections = [each for each in psutil.net_connections("inet") if each.pid == os.getpid()]
    print(*{each.laddr.ip for each in connections if each.status == "LISTEN"}, file=sys.stderr)
"""

SEVERAL_HOSTS = """
import os, sys
rank, os.environ["MASTER_ADDR"], os.environ["LOCAL_WORLD_SIZE"] = os.environ["RANK"], sys.argv[2], "1"
"""


def test_ranks_of_one_host_listen_on_loopback_only(in_processes, store):
    codes, errors = in_processes(LISTENS, store).end()
    assert codes == [0, 0], errors
    assert [error.splitlines()[-1] for error in errors] == ["127.0.0.1"] * 2
    assert "dshuffle: rank 0 of 2 listens on 127.0.0.1; connections need the secret" in errors[0]


@pytest.mark.parametrize("secret", ["auto", None])
def test_only_who_knows_the_secret_runs_code(in_threads, outer_address, tmp_path, secret):
    """With ``secret=None``, the same attack succeeds."""

    def attack(loader):
        if loader.rank:
            return
        address = loader._rank.address
        assert address.startswith(f"{'tcp' if secret is None else PROTOCOL}://{outer_address}:")
        with Client(address.replace(PROTOCOL, "tcp"), timeout=4, set_as_default=False) as client:
            client.run_on_scheduler((tmp_path / "code").touch)

    error = in_threads(2, attack, address=outer_address, secret=secret)[0]
    assert (tmp_path / "code").exists() == (secret is None)
    # Dask takes the beginning of the greeting for the length of a message.
    assert isinstance(error, OSError | MemoryError) == (secret is not None)


RANK = """
import json, os, sys, time
import psutil
import dshuffle

url, folder = sys.argv[1:3]
secret = None if sys.argv[3] == "none" else "auto"
with dshuffle.spmd(url, batch_size=8, secret=secret, timeout=100) as loader:
    samples = sum(len(ids) for ids, _ in next(loader.epochs(1)))
    listens = [each.laddr for each in psutil.net_connections("inet") if each.status == "LISTEN"]  # of the host
    with open(f"{folder}/{loader.rank}.part", "w") as file:
        json.dump([samples, *sorted({tuple(each) for each in listens})], file)
    os.rename(f"{folder}/{loader.rank}.part", f"{folder}/{loader.rank}.json")
    while not os.path.exists(f"{folder}/over"):
        time.sleep(0.05)
"""

ATTACKER = """
import asyncio, pathlib, sys
from distributed.core import rpc
from distributed.protocol.pickle import dumps

async def attack(address, attempt):
    mark = f"{sys.argv[1]}-{attempt}"
    def run():
        pathlib.Path(mark).touch()
    async with rpc(f"tcp://{address}", timeout=3) as peer:
        options = {"function": dumps(run), "args": dumps(()), "kwargs": dumps({}), "wait": True}
        await asyncio.wait_for(peer.run(**options) if attempt == "worker" else peer.run_function(**options), 4)

for address in sys.argv[2:]:
    for attempt in "scheduler", "worker":
        try:
            asyncio.run(attack(address, attempt))
        except BaseException as error:
            print(address, attempt, type(error).__name__)
        else:
            print(address, attempt, "done")
"""


@pytest.fixture
def hosts(tmp_path):
    """Three network namespaces of this machine."""
    place = Path(__file__).parents[1] / "benchmarks" / "network_hosts.py"
    spec = importlib.util.spec_from_file_location("network_hosts", place)
    network_hosts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(network_hosts)
    if not network_hosts.can_make_networks():
        pytest.skip("this process may not make network namespaces")
    with network_hosts.Hosts(3, tmp_path) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize(("secret", "n_hosts"), [("auto", 1), ("auto", 2), ("none", 2)])
def test_what_another_host_can_do(hosts, store, tmp_path, free_port, secret, n_hosts):
    """The third host connects to whatever listens on the others, as another user. Without a secret, it runs code."""
    folder = tmp_path / "job"
    folder.mkdir()
    for name, text in (("rank.py", RANK), ("attacker.py", ATTACKER)):
        (tmp_path / name).write_text(text)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(free_port)}
    variables |= {"LOCAL_WORLD_SIZE": str(2 // n_hosts), "XDG_CACHE_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(tmp_path / "rank.py"), store, str(folder), secret]
    ranks = [
        subprocess.Popen([*hosts.entering(rank % n_hosts), *command], env={**variables, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        end = time.monotonic() + 150
        while len(found := sorted(folder.glob("*.json"))) < 2:
            assert time.monotonic() < end
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        said = [json.loads(path.read_text()) for path in found]
        assert sum(samples for samples, *_ in said) == 103
        listens = [of_rank for _, *of_rank in said]
        addresses = {rank: {ip for ip, _ in listens[rank]} for rank in range(2)}
        if n_hosts == 1:
            assert addresses == {0: {"127.0.0.1"}, 1: {"127.0.0.1"}}
        else:
            assert addresses == {rank: {"127.0.0.1", hosts.addresses[rank]} for rank in range(2)}
        targets = {f"{hosts.addresses[rank % n_hosts]}:{port}" for rank in range(2) for _, port in listens[rank]}
        attacker = [*hosts.entering(2), sys.executable, str(tmp_path / "attacker.py"), str(tmp_path / "code")]
        other_home = {**variables, "XDG_CACHE_HOME": str(tmp_path / "other")}
        ran = subprocess.run([*attacker, *targets], env=other_home, capture_output=True, text=True, timeout=200)
        assert ran.returncode == 0, ran.stderr
        code = {path.name for path in tmp_path.glob("code-*")}
        assert code == ({"code-scheduler", "code-worker"} if secret == "none" else set()), ran.stdout
        (folder / "over").touch()
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_another_secret_is_told_at_once(in_threads):
    def connect(loader):
        if loader.rank == 0:
            with Client(loader._rank.address, security=SecretSecurity(b"x" * 32), set_as_default=False):
                pass

    assert isinstance(in_threads(2, connect)[0], OtherSecret)


HOMES = """
os.environ["XDG_CACHE_HOME"] = f"{sys.argv[3]}/{rank}"
os.environ |= {"DSHUFFLE_SECRET": "0123456789abcdef"} if sys.argv[4] == "variable" else {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("has", ["variable", "files"])
def test_hosts_that_share_no_home(in_processes, store, outer_address, tmp_path, has):
    script = LISTENS.replace("batch_size=8", "batch_size=8, timeout=60")
    ranks = in_processes(SEVERAL_HOSTS + HOMES + script, store, outer_address, tmp_path, has)
    if has == "files":
        ranks.processes[1].wait(60)
        ranks.processes[0].terminate()  # as srun --kill-on-bad-exit does
    codes, errors = ranks.end()
    if has == "variable":
        assert codes == [0, 0], errors
        return
    assert codes[1] == 1
    assert f"rank 1 has another secret than rank 0 on {outer_address}" in errors[1]
    assert f"Set {VARIABLE} to the same 16 or more random characters" in errors[1]
    assert "was refused: it does not have the secret of this job" in errors[0]


def test_without_a_home_a_job_on_several_hosts_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ClusterError) as error:
        key_of("auto", one_host=False)
    first, second = str(error.value).splitlines()
    assert "the ranks are on several hosts, and there is no secret for them, because" in first
    assert second.startswith(f"Set {VARIABLE} to the same {LEAST_LENGTH} or more random characters on all ranks")
    assert key_of("auto", one_host=True)[0] is not None
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    key, said = key_of("auto", one_host=False)
    assert key == key_of("0123456789abcdef", one_host=True)[0]
    assert said == f"connections need the secret of {VARIABLE}"


def test_a_name_that_does_not_resolve(in_threads, monkeypatch):
    monkeypatch.setattr("dshuffle.launched.ports.RESOLVE_WITHIN", 0.5)
    for rank, error in enumerate(in_threads(2, len, address="node-of-rank-0.invalid")):
        assert f"rank {rank} does not find the host of rank 0: the name 'node-of-rank-0.invalid' is not" in str(error)
        assert "Set MASTER_ADDR" in str(error)
        assert "srun --kill-on-bad-exit=1" in str(error)


def test_ports_that_refuse_take_no_time(free_port):
    """0.02 s. Dask would try for three seconds to connect to each of them."""

    async def find() -> float:
        key = SecretSecurity(b"k" * 32)
        place = Place(1, 2, 2, "127.0.0.1", "run 17")
        ports = [free_port + 1, free_port + 2, free_port]
        options = {"host": "127.0.0.1", "port": free_port, "protocol": PROTOCOL, "security": key}
        async with Scheduler(**options, dashboard_address=":0") as scheduler:
            Job(scheduler, Place(0, 2, 2, "127.0.0.1", "run 17"), ports, {})
            began = time.monotonic()
            await find_scheduler(place, "127.0.0.1", ports, {}, PROTOCOL, key, 60)
            return time.monotonic() - began

    assert asyncio.run(find()) < 2
