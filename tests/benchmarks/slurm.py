"""What happens to sessions on Slurm: jobs that come, fail, end at their walltime or lifetime, and resume elsewhere.

    python tests/benchmarks/slurm.py --shared FOLDER [--local FOLDER] [--interface NAME] [--jobs 3] [--only SCENE]

Run it where `sbatch` works, with five idle nodes. FOLDER is on storage that all nodes share; `--local` is a folder on a
disk of each node. Every epoch of every scene is checked: each sample is trained on exactly once. The testbed of
storage/ has such a Slurm: `python storage/testbed.py up --workers 5 --rate 1gbit`, `python storage/testbed.py slurm`,
and this script after `python storage/testbed.py exec scheduler`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask_jobqueue import SLURMCluster
from distributed import Client, Security

import dshuffle
from dshuffle.errors import ClusterError
from dshuffle.pipeline import BatchJobs
from dshuffle.runtime.client.cluster_view import wait_for_workers

SAMPLES = 40_000
EPOCHS = 12
PATIENCE = 120.0
"""Seconds for anything that has to wait for the queue."""

SILENCE = "30s"
"""Time after which Dask gives up a worker that is silent, in place of five minutes."""

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL when a job is preempted."""


def train(partition: dshuffle.Partition, seconds: float) -> np.ndarray:
    ids = np.concatenate([batch["id"] for batch in partition.batches(500)])
    time.sleep(seconds)
    return ids


class Scenes:
    """Sessions on one Slurm."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options, self.folder = options, folder
        ids = np.arange(SAMPLES)
        x = np.repeat(ids[:, None], 256, axis=1).astype("f4")
        self.dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": x, "id": ids})

    def job_options(self, **more: Any) -> dict[str, Any]:
        """Options of dask-jobqueue."""
        options: dict[str, Any] = {"cores": 1, "memory": "2 GiB", "walltime": "00:10:00", "log_directory": self.folder}
        options |= {"local_directory": self.options.local, "worker_extra_args": [], "python": sys.executable}
        options |= {"interface": self.options.interface} if self.options.interface else {}
        options |= {"scheduler_options": {"host": self.options.host}} if self.options.host else {}
        return options | more

    def struck(self, strike: Callable[[SLURMCluster], object], *, adaptive: bool = True, **more: Any) -> str:
        """Train five epochs, and do something to the cluster when the third one begins."""
        seconds = []
        with (
            self.cluster(self.options.jobs, adaptive=adaptive, **more) as (cluster, client),
            dshuffle.Shuffler(client, self.dataset, assignment="partial:0.3") as shuffler,
        ):
            for epoch in shuffler.epochs(5):
                if epoch.number == 2:
                    strike(cluster)
                seconds.append(self.epoch(client, epoch))
        return f"epochs of {seconds[1]:.1f} s, at most {max(seconds[2:]):.1f} s afterwards"

    @contextmanager
    def cluster(self, jobs: int, *, adaptive: bool = False, **more: Any) -> Iterator[tuple[SLURMCluster, Client]]:
        with SLURMCluster(**self.job_options(**more)) as cluster, Client(cluster) as client:
            cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs) if adaptive else cluster.scale(jobs=jobs)
            wait_for_workers(client, jobs, PATIENCE)
            yield cluster, client

    def epoch(self, client: Client, epoch: dshuffle.Epoch, seconds: float = 1.0, within: float = PATIENCE) -> float:
        """Train on an epoch, check it, and return how long it took."""
        began = time.monotonic()
        futures = epoch.map(train, seconds)
        ids = np.concatenate(client.gather(futures))
        assert np.array_equal(np.sort(ids), np.arange(SAMPLES)), "a sample was lost or trained on twice"
        assert time.monotonic() - began < within
        return time.monotonic() - began

    def a_job_is_cancelled(self) -> str:
        """A job is cancelled in the middle of an epoch, and the adaptive cluster submits another one."""
        return self.struck(cancel)

    def a_job_is_preempted(self) -> str:
        """The processes of a job get SIGTERM in the middle of an epoch, and SIGKILL half a minute later."""

        def preempt(cluster: SLURMCluster) -> None:
            job = first_job(cluster)
            signal(job, "TERM")
            threading.Timer(GRACE, signal, (job, "KILL")).start()

        return self.struck(preempt)

    def a_worker_without_nanny_is_killed(self) -> str:
        """`dask worker --no-nanny`: with the worker, its job ends."""
        return self.struck(lambda cluster: signal(first_job(cluster), "KILL"), nanny=False)

    def the_cluster_uses_tls(self) -> str:
        """A job is cancelled on a cluster with TLS."""
        options = {"security": Security.temporary(), "protocol": "tls://", "shared_temp_directory": self.folder}
        return self.struck(cancel, **options)

    def a_node_is_silent(self) -> str:
        """A node loses its power: the processes of a job stop, and no connection is closed. Nobody replaces it."""
        seconds: list[float] = []
        counts: list[int] = []

        def fit(shuffler: dshuffle.Shuffler) -> None:
            for epoch in shuffler.epochs(5 - shuffler.next_epoch):
                if epoch.number == 2 and len(seconds) == 2:
                    signal(job, "STOP")
                seconds.append(self.epoch(shuffler.client, epoch))
                counts.append(shuffler.n_workers)

        began = time.monotonic()
        silence = dask.config.set({"distributed.scheduler.worker-ttl": SILENCE})
        with silence, self.cluster(self.options.jobs) as (cluster, client):
            job = first_job(cluster)
            checkpoint = f"{self.folder}/silent.json"
            waits = {"elastic": True, "min_workers": 2, "patience": PATIENCE}
            try:
                dshuffle.run_with_retries(fit, lambda: client, self.dataset, checkpoint=checkpoint, **waits)
            finally:
                signal(job, "KILL")
        workers = ", ".join(map(str, counts))
        return f"workers of the epochs: {workers}; {time.monotonic() - began:.0f} s in all"

    def one_worker_has_less_memory(self) -> str:
        """A worker with a quarter of the memory of the others takes part."""
        with self.cluster(self.options.jobs - 1) as (cluster, client):
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address, "--nthreads=1"]
            worker += ["--memory-limit=512MiB", f"--local-directory={self.options.local}", "--death-timeout=60"]
            worker += [f"--interface={self.options.interface}"] if self.options.interface else []
            log = f"--output={self.folder}/small.txt"
            subprocess.run(["sbatch", log, "--time=5", f"--wrap={shlex.join(worker)}"], check=True, capture_output=True)
            wait_for_workers(client, self.options.jobs, PATIENCE)
            limits = client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit >> 20)
            with dshuffle.Shuffler(client, self.dataset) as shuffler:
                seconds = [self.epoch(client, epoch) for epoch in shuffler.epochs(3)]
            client.retire_workers([min(limits, key=limits.get)])
        return f"limits of {', '.join(map(str, sorted(limits.values())))} MiB; epochs of at most {max(seconds):.1f} s"

    def the_cluster_is_restarted(self) -> str:
        """`client.restart()` ends the session. Training goes on in another one, from the checkpoint."""
        epochs: list[list[int]] = []

        def fit(shuffler: dshuffle.Shuffler) -> None:
            epochs.append([])
            for epoch in shuffler.epochs(6 - shuffler.next_epoch):
                if epoch.number == 2 and len(epochs) == 1:
                    shuffler.client.restart(wait_for_workers=False)
                self.epoch(shuffler.client, epoch)
                epochs[-1].append(epoch.number)

        began = time.monotonic()
        with self.cluster(self.options.jobs, adaptive=True) as (_, client):
            checkpoint = f"{self.folder}/restart.json"
            waits = {"min_workers": self.options.jobs, "patience": PATIENCE}
            dshuffle.run_with_retries(fit, lambda: client, self.dataset, checkpoint=checkpoint, **waits)
        assert epochs == [[0, 1], [2, 3, 4, 5]]
        return f"6 epochs in two sessions, {time.monotonic() - began:.0f} s in all"

    def jobs_are_refused_or_fail(self) -> str:
        """A pipeline whose partition does not exist, and one whose program does not."""
        texts = []
        for options in ({"queue": "no-such-partition"}, {"python": "/no/such/python"}):
            began = time.monotonic()
            try:
                with BatchJobs("SLURM", jobs=self.options.jobs, options=self.job_options(**options)).open():
                    raise AssertionError("jobs have started")
            except ClusterError as error:
                words = str(error).rpartition(": ")[2]
                texts.append(f'"{words}" after {time.monotonic() - began:.0f} s')
        return "; ".join(texts)

    def jobs_come_and_go(self) -> str:
        """An elastic session takes in a job that starts late, and goes on without one that is cancelled."""
        counts = []
        with (
            self.cluster(self.options.jobs) as (cluster, client),
            dshuffle.Shuffler(client, self.dataset, elastic=True, min_workers=2) as shuffler,
        ):
            for epoch in shuffler.epochs(EPOCHS):
                self.epoch(client, epoch)
                counts.append(shuffler.n_workers)
                if epoch.number == 0:
                    cluster.scale(jobs=self.options.jobs + 1)
                    wait_for_workers(client, self.options.jobs + 1, PATIENCE)
                elif epoch.number == 5:
                    cancel(cluster)
        assert max(counts) == self.options.jobs + 1
        assert counts[-1] == self.options.jobs
        return f"workers of the epochs: {', '.join(map(str, counts))}"

    def it_resumes_in_new_jobs(self) -> str:
        """All jobs end. New ones resume from the checkpoint, and read the partitions from the disks of the nodes."""
        kept = {"cache_directory": f"{self.options.local}/rows", "keep_cache": True}
        checkpoint = f"{self.folder}/run.json"
        with (
            self.cluster(self.options.jobs) as (_, client),
            dshuffle.Shuffler(client, self.dataset, checkpoint=checkpoint, **kept) as shuffler,
        ):
            for epoch in shuffler.epochs(3):
                self.epoch(client, epoch)
        with (
            self.cluster(self.options.jobs) as (_, client),
            dshuffle.Shuffler.resume(client, self.dataset, checkpoint, **kept) as shuffler,
        ):
            assert shuffler.next_epoch == 3
            for epoch in shuffler.epochs(3):
                self.epoch(client, epoch)
            first = shuffler.records[0]
        return f"epoch {first.epoch} was resumed with {first.store_delivered_bytes:,} bytes of rows from the dataset"

    def it_meets_its_walltime(self) -> str:
        """Jobs end at a walltime of a minute, one after the other at their lifetime, and a pipeline goes on."""
        seen: list[float] = []
        options = self.job_options(walltime="00:01:00")
        jobs = BatchJobs("SLURM", jobs=self.options.jobs, options=options, patience=PATIENCE)

        def fit(shuffler: dshuffle.Shuffler, *, epochs: int) -> int:
            for epoch in shuffler.epochs(epochs - shuffler.next_epoch):
                self.epoch(shuffler.client, epoch, 6.0)
                seen.append(time.monotonic())
            return epochs

        began = time.monotonic()
        dshuffle.Pipeline(
            self.dataset, dshuffle.Training(fit, epochs=EPOCHS), cluster=jobs, checkpoint=f"{self.folder}/wall.json"
        ).run(progress=False)
        assert time.monotonic() - began > 60, "no job has met its walltime"
        assert len(seen) == EPOCHS
        longest = max(np.diff(seen))
        return f"{EPOCHS} epochs of 6 s in {time.monotonic() - began:.0f} s; at most {longest:.0f} s between two"

    def it_hands_over_before_the_walltime(self) -> str:
        """Workers retire at lifetimes below the walltime. Others take their samples, or a new session if all left."""
        leaving = ["--lifetime", "45s", "--lifetime-stagger", "15s"]
        counts: list[int] = []
        ends: list[float] = []
        shufflers: list[dshuffle.Shuffler] = []

        def fit(shuffler: dshuffle.Shuffler) -> None:
            shufflers.append(shuffler)
            for epoch in shuffler.epochs(2 * EPOCHS - shuffler.next_epoch):
                self.epoch(shuffler.client, epoch, 3.0)
                counts.append(shuffler.n_workers)
                ends.append(time.monotonic())

        with self.cluster(5, adaptive=True, worker_extra_args=leaving) as (_, client):
            first = {*client.scheduler_info()["workers"]}
            dshuffle.run_with_retries(
                fit,
                lambda: client,
                self.dataset,
                checkpoint=f"{self.folder}/lifetime.json",
                elastic=True,
                min_workers=2,
                patience=PATIENCE,
            )
            assert first.isdisjoint(client.scheduler_info()["workers"]), "no worker has met its lifetime"
        later = [record for shuffler in shufflers for record in shuffler.records[1:]]
        read = sum(record.store_delivered_bytes for record in later)
        workers = ", ".join(map(str, counts))
        longest = sorted(np.diff(ends))
        return (
            f"{len(shufflers)} sessions; {longest[len(longest) // 2]:.1f} s from epoch to epoch, at most "
            f"{longest[-1]:.1f} s; workers of the epochs: {workers}; {read:,} bytes of rows were read again"
        )

    def one_allocation(self) -> str:
        """`srun` starts scheduler, client and workers in one allocation, with dask-jobqueue's SLURMRunner."""
        options: dict[str, str] = {"interface": self.options.interface} if self.options.interface else {}
        script = Path(self.folder) / "runner.py"
        script.write_text(
            textwrap.dedent(f"""
            import numpy as np
            from dask_jobqueue.slurm import SLURMRunner
            from distributed import Client
            import dshuffle

            if __name__ == "__main__":
                with SLURMRunner(
                    scheduler_file="{self.folder}/scheduler-{{job_id}}.json",
                    scheduler_options={options},
                    worker_class="distributed.Nanny",
                    worker_options={options | {"local_directory": self.options.local}},
                ) as runner, Client(runner) as client:
                    client.wait_for_workers(runner.n_workers, timeout={PATIENCE})
                    with dshuffle.Shuffler(client, "{self.dataset.url}") as shuffler:
                        for epoch in shuffler.epochs(3):
                            found = client.gather(epoch.map(lambda partition: partition.sample_ids.copy()))
                            assert np.array_equal(np.sort(np.concatenate(found)), np.arange({SAMPLES}))
                    print("trained on", shuffler.n_workers, "workers", flush=True)
            """)
        )
        command = ["srun", "--ntasks=4", "--nodes=4", "--time=3", sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert "trained on 2 workers" in done.stdout, done.stdout + done.stderr
        return "trained on 2 workers of 4 tasks"


def first_job(cluster: SLURMCluster) -> str:
    """Number of the job of one worker."""
    return str(next(iter(cluster.workers.values())).job_id)


def cancel(cluster: SLURMCluster) -> None:
    """Cancel the job of one worker."""
    subprocess.run(["scancel", first_job(cluster)], check=True)


def signal(job: str, name: str) -> None:
    """Send a signal to all processes of a job, if it has not ended."""
    subprocess.run(["scancel", "--full", f"--signal={name}", job], check=False, capture_output=True)


SCENES: dict[str, Callable[[Scenes], str]] = {
    "cancelled": Scenes.a_job_is_cancelled,
    "elastic": Scenes.jobs_come_and_go,
    "resumed": Scenes.it_resumes_in_new_jobs,
    "walltime": Scenes.it_meets_its_walltime,
    "lifetime": Scenes.it_hands_over_before_the_walltime,
    "runner": Scenes.one_allocation,
    "preempted": Scenes.a_job_is_preempted,
    "no-nanny": Scenes.a_worker_without_nanny_is_killed,
    "tls": Scenes.the_cluster_uses_tls,
    "silent": Scenes.a_node_is_silent,
    "memory": Scenes.one_worker_has_less_memory,
    "restarted": Scenes.the_cluster_is_restarted,
    "refused": Scenes.jobs_are_refused_or_fail,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", required=True, help="folder that all nodes see")
    parser.add_argument("--local", default="/tmp", help="folder on a disk of each node")
    parser.add_argument("--interface", help="network interface of the nodes")
    parser.add_argument("--host", help="address of this host that nodes reach, in place of --interface")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--only", choices=SCENES, action="append")
    options = parser.parse_args()
    dask.config.set({"distributed.deploy.lost-worker-timeout": "5s"})
    with tempfile.TemporaryDirectory(dir=options.shared) as folder:
        scenes = Scenes(options, folder)
        for name in options.only or SCENES:
            began = time.monotonic()
            found = SCENES[name](scenes)
            print(f"{name:10} {time.monotonic() - began:4.0f} s: {found}", flush=True)


if __name__ == "__main__":
    main()
