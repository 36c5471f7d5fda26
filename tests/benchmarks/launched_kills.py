"""Kill ranks of jobs that torchrun starts, at random, and count how often each sample was trained on.

    python tests/benchmarks/launched_kills.py [--jobs 5] [--kills 4] [--ranks 3] [--seed 0]

Needs PyTorch. Each job trains for some epochs with ``dshuffle.spmd`` and a checkpoint. A few seconds after all ranks
have started, a random one gets SIGKILL. torchrun then starts all of them again, and they resume. An epoch that was
interrupted is repeated from its beginning, so what counts is its last repetition: there every sample must come once.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import dshuffle

SAMPLES, BATCH, EPOCHS = 3_000, 20, 6
SCRIPT = f"""
import os, sys, time
import numpy as np
import dshuffle

url, folder = sys.argv[1:]
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(f"{{folder}}/started-{{attempt}}-{{rank}}-{{os.getpid()}}", "w"):
    pass
with dshuffle.spmd(url, batch_size={BATCH}, checkpoint=f"{{folder}}/run.json") as loader:
    for epoch in loader.epochs({EPOCHS}):
        with open(f"{{folder}}/training-{{attempt}}", "w"):
            pass
        seen = []
        for (ids,) in epoch:
            seen.append(ids)
            time.sleep(0.04)
        np.save(f"{{folder}}/epoch-{{epoch.number}}-{{attempt}}-{{rank}}.npy", np.concatenate(seen))
"""


def started(folder: Path, attempt: int) -> list[int]:
    """Processes of the ranks of an attempt."""
    return [int(path.name.rsplit("-", 1)[1]) for path in folder.glob(f"started-{attempt}-*")]


def run_job(folder: Path, url: str, kills: int, n_ranks: int, rng: random.Random) -> list[float]:
    """Run a job, and return after how many seconds torchrun had started all ranks again after each kill."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks)]
    command += [
        "--max-restarts",
        "1000",
        "--monitor-interval",
        "0.1",
        "--master-port",
        str(rng.randrange(21000, 29000)),
    ]
    seconds, attempt = [], 0
    log = folder / "log.txt"
    with log.open("w") as file, subprocess.Popen([*command, script, url, folder], stdout=file, stderr=file) as job:
        while job.poll() is None:
            ranks = started(folder, attempt)
            if len(ranks) < n_ranks or attempt == kills:
                time.sleep(0.05)
                continue
            time.sleep(rng.uniform(0.0, 9.0))  # while ranks meet, while the session opens, and in any epoch
            if job.poll() is not None:
                break
            with suppress(ProcessLookupError):  # the rank has ended
                os.kill(rng.choice(ranks), signal.SIGKILL)
            struck, attempt = time.monotonic(), attempt + 1
            while len(started(folder, attempt)) < n_ranks and job.poll() is None:
                time.sleep(0.02)
            if len(started(folder, attempt)) == n_ranks:  # otherwise all ranks had ended before the kill
                seconds.append(time.monotonic() - struck)
    if job.returncode:
        sys.exit(f"the job failed:\n{log.read_text()[-4000:]}")
    return seconds


def check(folder: Path, n_ranks: int) -> None:
    """Check the last repetition of each epoch."""
    for epoch in range(EPOCHS):
        attempts = collections.defaultdict(list)
        for path in folder.glob(f"epoch-{epoch}-*.npy"):
            attempts[int(path.stem.split("-")[2])].append(np.load(path))
        last = attempts[max(attempts)]
        ids = np.sort(np.concatenate(last))
        if len(last) != n_ranks or not np.array_equal(ids, np.arange(SAMPLES)):
            sys.exit(f"epoch {epoch}: {len(last)} ranks trained on {len(np.unique(ids))} samples, {len(ids)} in all")


def main() -> None:
    """Run the jobs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=4, help="at most, in each job")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, total, in_epochs = random.Random(options.seed), 0, 0
    for number in range(options.jobs):
        with tempfile.TemporaryDirectory() as name:
            folder, url = Path(name), f"{name}/ids.zarr"
            dshuffle.create_dataset(url, {"id": np.arange(SAMPLES)})
            began = time.monotonic()
            seconds = run_job(folder, url, options.kills, options.ranks, rng)
            check(folder, options.ranks)
            total += len(seconds)
            in_epochs += sum((folder / f"training-{attempt}").exists() for attempt in range(len(seconds)))
            again = f"{statistics.median(seconds):.1f} s" if seconds else "-"
            print(
                f"job {number}: {time.monotonic() - began:.0f} s, {len(seconds)} kills, ranks started again after "
                f"{again} (median); each of {EPOCHS} epochs had each sample once",
                flush=True,
            )
    print(f"{total} kills in {options.jobs} jobs, {in_epochs} of them in an epoch: no sample was lost or came twice")


if __name__ == "__main__":
    main()
