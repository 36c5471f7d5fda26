"""Which rank a process is, how ranks find rank 0 whatever else listens on their ports, and who may connect to them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import socketserver
import threading

import dask
import psutil
import pytest
from distributed import Client, Scheduler, Security

import dshuffle
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.connections import VARIABLE, OtherSecret, Place, find_port, job_scheme, place_of, port_of

# Variables as the launchers set them (torchrun 2.13; Open MPI 5; MPICH 4; Slurm 23).
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM_BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "n[3-5]"}
SRUN = {
    **SLURM_BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "n[3-5]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-a-17@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 1, "127.0.0.1")),
        (TORCHRUN, (3, 4, 2, "node7")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, (3, 4, 4, "127.0.0.1")),
        ({**TORCHRUN, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "0"}, (3, 4, 4, "127.0.0.1")),
        (SRUN, (4, 6, 2, "n3")),
        ({**SRUN, "MASTER_ADDR": "10.1.0.3"}, (4, 6, 2, "10.1.0.3")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2),4"}, (4, 6, 4, "n3")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_NODEID": "0"}, (4, 6, 6, "127.0.0.1")),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu-a[07,9-12]-ib,cpu1"}, (4, 6, 2, "gpu-a07-ib")),
        (SLURM_BATCH, (0, 1, 1, "127.0.0.1")),
        (OPEN_MPI, (1, 4, 4, "127.0.0.1")),
        (MPICH, (2, 4, 4, "127.0.0.1")),
        ({**MPICH, **SRUN, "PMI_RANK": "4", "PMI_SIZE": "6"}, (4, 6, 2, "n3")),
        # mpirun starts its processes through srun, and torchrun is started by it.
        ({**SRUN, **OPEN_MPI}, (1, 4, 4, "127.0.0.1")),
        ({**SRUN, **TORCHRUN}, (3, 4, 2, "node7")),
        # A job script exports these for torch.distributed.
        ({**SRUN, "WORLD_SIZE": "6", "MASTER_ADDR": "10.1.0.3", "MASTER_PORT": "1"}, (4, 6, 2, "10.1.0.3")),
    ],
)
def test_places(variables, expected):
    assert place_of(variables)[:4] == expected


@pytest.mark.parametrize(
    ("variables", "explicit", "words"),
    [
        (
            {"RANK": "1"},
            {},
            "world_size='' is not allowed; it must be an integer >= 1. Give both rank and world_size, or",
        ),
        ({"WORLD_SIZE": "2"}, {}, "rank='' is not allowed"),
        ({**TORCHRUN, "RANK": "one"}, {}, "rank='one' is not allowed; it must be an integer"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, {}, "world_size=0 is not allowed; it must be an integer >= 1"),
        ({**TORCHRUN, "RANK": "4"}, {}, "rank=4 is not allowed; it must be below world_size=4"),
        ({}, {"rank": 1}, "world_size=None is not allowed; it must be an integer >= 1. Give both"),
        ({}, {"world_size": 2}, "rank=None is not allowed"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {}, "mpirun of Open MPI does not say on which host rank 0"),
        (TORCHRUN, {"address": "tcp://node7"}, "address='tcp://node7'"),
        (TORCHRUN, {"address": ""}, "address=''"),
    ],
)
def test_what_is_wrong_is_named(variables, explicit, words):
    with pytest.raises(InvalidParameter) as error:
        place_of(variables, **explicit)
    assert words in str(error.value)


def test_explicit_values_win():
    """A launcher of another number of ranks does not say where all are: here two hosts, and a job of one rank each."""
    assert place_of(TORCHRUN, rank=1, world_size=2) == Place(1, 2, 2, "node7", "")
    for variables in ({}, TORCHRUN, SRUN):
        place = place_of(variables, rank=1, world_size=3, address="10.0.0.1")
        assert (place.rank, place.world_size, place.address) == (1, 3, "10.0.0.1")


def test_processes_that_multiprocessing_starts_need_a_rank(monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", object)
    with pytest.raises(InvalidParameter, match="rank is not allowed: multiprocessing has started this process"):
        place_of({})
    assert place_of({}, rank=0, world_size=1) == Place(0, 1, 1, "127.0.0.1", "")


def port(**changes):
    with port_of(place_of({**TORCHRUN, **changes}), None) as found:
        return found


def test_ranks_of_a_job_derive_the_same_port_and_other_jobs_others():
    assert port() == port(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert port() not in [port(**{name: "9"}) for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE")]
    assert 20_000 <= port() < 32_000
    with port_of(place_of(TORCHRUN), None) as first, port_of(place_of(TORCHRUN), None) as second:
        assert port() != first != second


def test_ranks_that_are_job_steps_of_their_own_need_a_port():
    """Each of them is started by a call of srun, so that the launcher's job is that of one rank."""
    step = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    place = place_of({**step, "SLURM_STEP_ID": "1"}, rank=1, world_size=2, address="n3")
    assert (place.world_size, place.address, place.job) == (2, "n3", "")
    with pytest.raises(InvalidParameter, match="port=None"), port_of(place, None):
        pass


# Ports

PLACE = Place(1, 2, 2, "127.0.0.1", "run 17")


def in_event_loop(test):
    """Run a test that is a coroutine. (Dask's gen_test would reset the configuration for all tests that follow.)"""

    @functools.wraps(test)
    def run(*fixtures, **named_fixtures):
        asyncio.run(asyncio.wait_for(test(*fixtures, **named_fixtures), 60))

    return run


def scheduler_of(place, port, **options):
    options = {"host": place.address, "port": port, "protocol": job_scheme(place, port), **options}
    return Scheduler(dashboard_address=":0", **options)


class Web(socketserver.StreamRequestHandler):
    """Another program, which answers in another language."""

    def handle(self):
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def n_samples(loader):
    return sum(len(ids) for ids, _ in next(loader.epochs(1)))


@pytest.mark.parametrize("kind", ["no job", "another job", "web"])
@in_event_loop
async def test_programs_that_are_not_joined(free_port, monkeypatch, caplog, kind):
    monkeypatch.setattr("dshuffle.launched.connections.LOG_AFTER", 0.0)
    async with contextlib.AsyncExitStack() as running:
        if kind == "web":
            server = running.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", free_port), Web))
            threading.Thread(target=server.serve_forever).start()
            running.callback(server.shutdown)
        elif kind == "no job":
            scheduler = Scheduler(host="127.0.0.1", port=free_port, dashboard_address=":0")
            await running.enter_async_context(scheduler)
        else:
            await running.enter_async_context(scheduler_of(PLACE._replace(job="run 17; restart 1"), free_port))
        with pytest.raises(ClusterError, match="rank 1 did not find rank 0"):
            await find_port(PLACE, job_scheme(PLACE, free_port), "127.0.0.1", free_port, 0.5)
    assert f"dshuffle: rank 1 did not find rank 0 on 127.0.0.1, port {free_port}, within 0 s" in caplog.text


@in_event_loop
async def test_a_scheduler_that_comes_later_on_an_ipv6_address(free_port):
    place = PLACE._replace(address="::1")
    found = asyncio.create_task(find_port(place, job_scheme(place, free_port), "::1", free_port, 60))
    await asyncio.sleep(0.3)
    try:
        scheduler = await scheduler_of(place, free_port, host="[::1]")
    except RuntimeError:
        found.cancel()
        pytest.skip("this host has no IPv6")
    async with scheduler:
        await asyncio.wait_for(found, 2)


@pytest.mark.parametrize("seconds", [1, 0])
def test_a_port_that_is_in_use(store, in_threads, free_port, monkeypatch, seconds):
    """Children of a killed rank may hold it for some seconds. Otherwise it is named."""
    monkeypatch.setattr("dshuffle.launched.connections.FREE_WITHIN", 30.0 * seconds)
    with socketserver.ThreadingTCPServer(("127.0.0.1", free_port), Web) as server:
        timer = threading.Timer(seconds, server.server_close)
        if seconds:
            timer.start()
            assert sorted(in_threads(2, n_samples)) == [51, 52]
        else:
            words = f"rank 0 could not listen on 127.0.0.1, port {free_port} within 0 s .*in use.* Give a free one"
            with pytest.raises(ClusterError, match=words):
                dshuffle.spmd(store, batch_size=8, rank=0, world_size=2, port=free_port)


# Hosts


@pytest.fixture
def outer_address():
    """An IPv4 address of this host that other hosts may reach."""
    for listed in psutil.net_if_addrs().values():
        for address in listed:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this host has no other address")


@pytest.mark.parametrize("name", ["", "127.1"])
def test_an_address_that_is_not_loopback(in_threads, outer_address, name):
    """As on several hosts: the ranks listen on one network. HTTP is for this host only.

    Debian resolves the name of a host to 127.0.1.1. The resolver takes 127.1 for 127.0.0.1, although it is not written
    as an IP address.
    """

    def loop(loader):
        servers = [loader._rank.worker] + ([loader._rank.job.scheduler] if loader._rank.job else [])
        http = {server.http_server.address for server in servers}
        return servers[0].address.partition("://")[2].rpartition(":")[0], http, n_samples(loader)

    hosts, http, counts = zip(*in_threads(2, loop, address=name or outer_address), strict=True)
    assert (http, sorted(counts)) == (({"127.0.0.1"},) * 2, [51, 52])
    assert not any(host.startswith("127.") for host in hosts)
    assert name or hosts == (outer_address,) * 2


def test_a_name_that_does_not_resolve(in_threads):
    for rank, error in enumerate(in_threads(2, len, address="node-of-rank-0.invalid")):
        assert f"rank {rank} does not find the host of rank 0: the name 'node-of-rank-0.invalid' is not" in str(error)
        assert "Set MASTER_ADDR" in str(error)


# Secrets and TLS

LISTENS = """
import os, sys
import psutil
import dshuffle

with dshuffle.spmd(sys.argv[1], batch_size=8, timeout=60) as loader:
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


@pytest.mark.parametrize("knows", ["nothing", "the job", "the secret"])
def test_only_who_knows_the_secret_runs_code(in_threads, outer_address, free_port, tmp_path, monkeypatch, knows):
    def attack(loader):
        if loader.rank:
            return
        address = loader._rank.worker.scheduler.address
        assert f"://{outer_address}:" in address
        if knows == "nothing":
            address = f"tcp://{address.partition('://')[2]}"
        elif knows == "the job":
            monkeypatch.setenv(VARIABLE, "another one for this")
            job_scheme(loader._rank.place, free_port)
        with Client(address, timeout=4, set_as_default=False) as client:
            client.run_on_scheduler((tmp_path / "code").touch)

    error = in_threads(2, attack, address=outer_address)[0]
    assert (tmp_path / "code").exists() == (knows == "the secret")
    # Dask takes the beginning of the greeting for the length of a message.
    kinds = {"nothing": OSError | MemoryError | ValueError, "the job": OtherSecret, "the secret": type(None)}
    assert isinstance(error, kinds[knows])


@pytest.mark.parametrize("setting", ["default-scheme", "require-encryption"])
def test_tls(in_threads, tmp_path, setting):
    pytest.importorskip("cryptography", reason="Dask needs it to make certificates")
    certificates = Security.temporary()
    settings = {f"distributed.comm.{setting}": "tls" if setting == "default-scheme" else True}
    for name, role in (("ca-file", "ca_file"), ("worker.cert", "worker_cert"), ("worker.key", "worker_key")):
        path = tmp_path / name
        path.write_text(getattr(certificates, f"tls_{role}"))
        settings[f"distributed.comm.tls.{name}"] = str(path)
    for role in ("scheduler", "client"):
        for part in ("cert", "key"):
            settings[f"distributed.comm.tls.{role}.{part}"] = settings[f"distributed.comm.tls.worker.{part}"]
    with dask.config.set(settings):
        ranks = in_threads(
            2, lambda loader: (type(loader._rank.worker.listener).__mro__[1].__name__, n_samples(loader))
        )
    assert sorted(ranks) == [("TLSListener", 51), ("TLSListener", 52)]


HOMES = """
os.environ["XDG_CACHE_HOME"] = f"{sys.argv[3]}/{rank}"
"""


@pytest.mark.slow
def test_hosts_that_share_no_home(in_processes, store, outer_address, tmp_path):
    ranks = in_processes(SEVERAL_HOSTS + HOMES + LISTENS, store, outer_address, tmp_path)
    ranks.processes[1].wait(60)
    ranks.processes[0].terminate()  # as srun --kill-on-bad-exit does
    codes, errors = ranks.end()
    assert codes[1] == 1
    assert f"rank 1 did not find rank 0 on {outer_address}" in errors[1]
    assert "the other end has another secret: the hosts do not share this user's home" in errors[1]
    assert f"Set {VARIABLE} to the same 16 or more random characters" in errors[1]
    assert "was refused: it does not have the secret of this job" in errors[0]


def test_secrets_that_are_missing_or_short(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert job_scheme(PLACE, 4000)  # a file in the folder for temporary files
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ClusterError) as error:
        job_scheme(Place(0, 2, 1, "node7", ""), 4000)
    assert "there is no secret for the ranks of the job, because" in str(error.value)
    assert f"Set {VARIABLE} to the same 16 or more random characters on all ranks" in str(error.value)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(InvalidParameter, match="it has fewer than 16 characters") as error:
        job_scheme(PLACE, 4000)
    assert "short" not in str(error.value)
