"""Rank, number of ranks and the address of rank 0 from the variables of launchers."""

from __future__ import annotations

import threading

import dask
import pytest

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.launched.launcher import Place, place_of
from dshuffle.launched.ports import job_key, ports_of

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
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "n[3-5]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-a-17@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}


def place(variables, **explicit):
    found = place_of(variables, **explicit)
    return found.rank, found.world_size, found.local_size, found.address


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 1, "127.0.0.1")),
        (TORCHRUN, (3, 4, 2, "node7")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, (3, 4, 4, "127.0.0.1")),
        ({**TORCHRUN, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "0"}, (3, 4, 4, "127.0.0.1")),
        (SRUN, (4, 6, 2, "n3")),
        ({**SRUN, "MASTER_ADDR": "10.1.0.3"}, (4, 6, 2, "10.1.0.3")),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "4"}, (4, 6, 2, "n3")),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, (4, 6, 6, "127.0.0.1")),
        ({**SRUN, "SLURM_STEP_NODELIST": "n1,n2"}, (4, 6, 2, "n1")),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[01-03]"}, (4, 6, 2, "n01")),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu-a[7,9-12]-ib,cpu1"}, (4, 6, 2, "gpu-a7-ib")),
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
    assert place(variables) == expected


@pytest.mark.parametrize("variables", [{}, TORCHRUN, SRUN])
def test_explicit_values_win(variables):
    assert place(variables, rank=1, world_size=3, address="10.0.0.1")[:2] == (1, 3)
    assert place(variables, rank=1, world_size=3, address="10.0.0.1")[3] == "10.0.0.1"


@pytest.mark.parametrize(
    ("variables", "explicit", "words"),
    [
        ({"RANK": "1"}, {}, "WORLD_SIZE is not allowed: it is not set, and RANK is"),
        ({"WORLD_SIZE": "2"}, {}, "RANK is not allowed: it is not set, and WORLD_SIZE is"),
        ({**TORCHRUN, "RANK": "one"}, {}, "RANK='one' is not allowed; it must be an integer >= 0, as torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, {}, "WORLD_SIZE='0' is not allowed; it must be an integer >= 1"),
        ({**TORCHRUN, "RANK": "4"}, {}, "rank=4 is not allowed; it must be below world_size=4"),
        ({}, {"rank": 1}, "rank is not allowed: world_size is not given"),
        ({}, {"world_size": 2}, "world_size is not allowed: rank is not given"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {}, "mpirun of Open MPI does not say on which host rank 0"),
        (TORCHRUN, {"address": "tcp://node7"}, "address='tcp://node7'"),
        (TORCHRUN, {"address": ""}, "address=''"),
    ],
)
def test_what_is_wrong_is_named(variables, explicit, words):
    with pytest.raises(InvalidParameter) as error:
        place_of(variables, **explicit)
    assert words in str(error.value)


def test_a_launcher_of_another_number_of_ranks_does_not_say_where_all_are():
    """Two hosts of two processes, and a job of two of them, which are on different hosts."""
    assert place(TORCHRUN, rank=1, world_size=2) == (1, 2, 2, "node7")


def ports(**changes):
    with ports_of(place_of({**TORCHRUN, **changes}), None) as found:
        return found


def test_ranks_of_a_job_derive_the_same_ports_and_other_jobs_others():
    assert ports() == ports(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    for change in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        assert not set(ports()) & set(ports(**{change: "9"})), change
    assert all(20_000 <= port < 32_000 for port in ports())


def test_restarts_count_only_if_all_ranks_have_the_same_agent():
    def keys(restart, local_size):
        changes = {"TORCHELASTIC_RESTART_COUNT": restart, "LOCAL_WORLD_SIZE": local_size}
        place = place_of({**TORCHRUN, **changes})
        return job_key(place, ports(**changes)), job_key(place, [4000])

    assert keys("0", "2") == keys("3", "2")
    assert not set(keys("0", "4")) & set(keys("3", "4"))


def test_ranks_that_are_job_steps_of_their_own_have_the_same_key():
    """Each of them is started by a call of srun, so that the launcher's job is that of one rank."""
    step = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    places = [
        place_of({**step, "SLURM_STEP_ID": str(rank)}, rank=rank, world_size=2, address="n3") for rank in range(2)
    ]
    assert job_key(places[0], [4000]) == job_key(places[1], [4000])
    with pytest.raises(InvalidParameter, match="port=None"), ports_of(places[0], None):
        pass


def test_a_port_that_is_given_wins():
    with ports_of(Place(0, 2, 2, "127.0.0.1", "a"), 4000) as found:
        assert found == [4000]


def test_dask_takes_no_profile_of_the_loop(store):
    """Ten stacks of the loop's thread a second and more would cost it time, and there is no dashboard to show them."""
    before = set(threading.enumerate())
    with (
        dask.config.set({"distributed.worker.profile.enabled": True}),
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=1) as loader,
    ):
        next(loader.epochs(1))
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert dask.config.get("distributed.worker.profile.enabled"), "the configuration of the script stays"
    assert "IO loop" in names
    assert "Profile" not in names
