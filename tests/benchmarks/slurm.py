"""What happens to sessions on Slurm: jobs that come, fail, end at their walltime or lifetime, and resume elsewhere.

    python tests/benchmarks/slurm.py --shared FOLDER [--local FOLDER] [--interface NAME] [--jobs 3] [--only SCENE]

Run it where `sbatch` works, with four idle nodes. FOLDER is on storage that all nodes share; `--local` is a folder on a
disk of each node. Every epoch of every scene is checked: each sample is trained on exactly once. The testbed of
storage/ has such a Slurm: `python storage/testbed.py up --workers 4 --rate 1gbit`, `python storage/testbed.py slurm`,
and this script after `python storage/testbed.py exec scheduler`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
from dask_jobqueue import SLURMCluster
from distributed import Client

import dshuffle
from dshuffle.pipeline import BatchJobs

SAMPLES = 40_000
EPOCHS = 12
PATIENCE = 120.0
"""Seconds for anything that has to wait for the queue."""


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

    @contextmanager
    def cluster(self, jobs: int, *, adaptive: bool = False, **more: Any) -> Iterator[tuple[SLURMCluster, Client]]:
        options = self.options
        given: dict[str, Any] = {"cores": 1, "memory": "2 GiB", "walltime": "00:10:00", "log_directory": self.folder}
        given |= {"local_directory": options.local, "worker_extra_args": [], "python": sys.executable}
        given |= {"interface": options.interface} if options.interface else {}
        given |= {"scheduler_options": {"host": options.host}} if options.host else {}
        with SLURMCluster(**given | more) as cluster, Client(cluster) as client:
            cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs) if adaptive else cluster.scale(jobs=jobs)
            client.wait_for_workers(jobs, timeout=PATIENCE)
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
        seconds = []
        with (
            self.cluster(self.options.jobs, adaptive=True) as (cluster, client),
            dshuffle.Shuffler(client, self.dataset, assignment="partial:0.3") as shuffler,
        ):
            for epoch in shuffler.epochs(5):
                if epoch.number == 2:
                    cancel(cluster)
                seconds.append(self.epoch(client, epoch))
        return f"epochs of {seconds[1]:.1f} s, {max(seconds[2:]):.1f} s where a job was cancelled"

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
                    client.wait_for_workers(self.options.jobs + 1, timeout=PATIENCE)
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
        options = {"cores": 1, "memory": "2 GiB", "walltime": "00:01:00", "local_directory": self.options.local}
        options |= {"log_directory": self.folder, "python": sys.executable}
        options |= {"interface": self.options.interface} if self.options.interface else {}
        options |= {"scheduler_options": {"host": self.options.host}} if self.options.host else {}
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
        leaving = ["--lifetime", "40s", "--lifetime-stagger", "20s"]
        counts: list[int] = []
        shufflers: list[dshuffle.Shuffler] = []

        def fit(shuffler: dshuffle.Shuffler) -> None:
            shufflers.append(shuffler)
            for epoch in shuffler.epochs(2 * EPOCHS - shuffler.next_epoch):
                self.epoch(shuffler.client, epoch, 3.0)
                counts.append(shuffler.n_workers)

        with self.cluster(self.options.jobs, adaptive=True, worker_extra_args=leaving) as (_, client):
            first = {*client.scheduler_info()["workers"]}
            dshuffle.retrying(
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
        return f"{len(shufflers)} sessions; workers of the epochs: {workers}; {read:,} bytes of rows were read again"

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


def cancel(cluster: SLURMCluster) -> None:
    """Cancel the job of one worker."""
    job = next(iter(cluster.workers.values())).job_id
    subprocess.run(["scancel", str(job)], check=True)


SCENES: dict[str, Callable[[Scenes], str]] = {
    "cancelled": Scenes.a_job_is_cancelled,
    "elastic": Scenes.jobs_come_and_go,
    "resumed": Scenes.it_resumes_in_new_jobs,
    "walltime": Scenes.it_meets_its_walltime,
    "lifetime": Scenes.it_hands_over_before_the_walltime,
    "runner": Scenes.one_allocation,
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
            print(f"{name:10} exact, {time.monotonic() - began:4.0f} s: {found}", flush=True)


if __name__ == "__main__":
    main()
