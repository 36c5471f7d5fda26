"""End ranks of jobs at random, and count how often each sample was trained on.

    python tests/benchmarks/launched_kills.py [--jobs 5] [--kills 4] [--ends 20] [--ranks 3] [--seed 0]

Each job trains for some epochs with ``dshuffle.spmd`` and a checkpoint.

* Kills, which need PyTorch: a few seconds after torchrun has started all ranks, a random one gets SIGKILL. torchrun
  then starts all of them again, and they resume.
* Ends: a random rank of a job without a launcher ends in another way, at a random batch: a ``break`` out of the epoch
  or out of the loop, an exception, or ``SystemExit``. Every other rank must raise an error that names the reason, which
  takes the printed seconds. Then the same job runs once more, and resumes.

An epoch that was interrupted is repeated from its beginning, so what counts is its last repetition: there every sample
must come once.
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
WAYS = ["leave the epoch", "leave the loop", "raise", "exit"]
"""How a rank ends."""

SCRIPT = f"""
import os, sys, time
import numpy as np
import dshuffle

url, folder, way, *moment = sys.argv[1:]
rank = os.environ["RANK"]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", os.environ.get("ATTEMPT")))
with open(f"{{folder}}/started-{{attempt}}-{{rank}}-{{os.getpid()}}", "w"):
    pass

def say(name, text=""):
    with open(f"{{folder}}/{{name}}-{{attempt}}-{{rank}}", "w") as file:
        file.write(f"{{time.time()}} {{text}}")

def end():
    say("ends")
    if way == "raise":
        raise ZeroDivisionError("a bug")
    if way == "exit":
        sys.exit("enough")

try:
    with dshuffle.spmd(url, batch_size={BATCH}, checkpoint=f"{{folder}}/run.json") as loader:
        for epoch in loader.epochs({EPOCHS}):
            with open(f"{{folder}}/training-{{attempt}}", "w"):
                pass
            seen, ended = [], False
            for number, (ids,) in enumerate(epoch):
                seen.append(ids)
                time.sleep(0.04)
                if moment == [rank, str(epoch.number), str(number)]:
                    end()
                    ended = True
                    break
            np.save(f"{{folder}}/epoch-{{epoch.number}}-{{attempt}}-{{rank}}.npy", np.concatenate(seen))
            if ended and way == "leave the loop":
                break
except BaseException as error:
    say("error", f"{{type(error).__name__}}: {{error}}")
    raise
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
    with log.open("w") as file, subprocess.Popen([*command, script, url, folder, ""], stdout=file, stderr=file) as job:
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


def run_ranks(folder: Path, url: str, attempt: int, n_ranks: int, port: int, *arguments: object) -> list[int]:
    """Run a job without a launcher, and return the exit statuses of its ranks."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "ATTEMPT": str(attempt)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, script, url, folder, *map(str, arguments)]
    with (folder / f"log-{attempt}.txt").open("w") as log:
        ranks = [
            subprocess.Popen(command, env={**variables, "RANK": str(rank)}, stdout=log, stderr=log)
            for rank in range(n_ranks)
        ]
        try:
            return [rank.wait(300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def end_early(folder: Path, url: str, n_ranks: int, rng: random.Random) -> tuple[str, float]:
    """Run a job of which a rank ends early, and resume it. Return how it ended, and how fast the others did."""
    way, port = rng.choice(WAYS), rng.randrange(21000, 29000)
    n_batches = -(-(SAMPLES // n_ranks) // BATCH)
    rank, epoch, batch = rng.randrange(n_ranks), rng.randrange(EPOCHS), rng.randrange(n_batches - 1)
    statuses = run_ranks(folder, url, 0, n_ranks, port, way, rank, epoch, batch)
    what = f"rank {rank}: {way}, epoch {epoch}, batch {batch}"
    struck, seconds = float((folder / f"ends-0-{rank}").read_text()), 0.0
    for other in set(range(n_ranks)) - {rank}:
        error = folder / f"error-0-{other}"
        if not error.exists() or not statuses[other]:
            sys.exit(f"{what}: rank {other} ended with {statuses[other]} and without an error")
        moment, text = error.read_text().split(" ", 1)
        seconds = max(seconds, float(moment) - struck)
        if f"rank {rank} of {n_ranks}" not in text and "All ranks must go through the same epochs" not in text:
            sys.exit(f"{what}: rank {other} says {text}")
    if any(run_ranks(folder, url, 1, n_ranks, port + 1, "")):
        sys.exit(f"{what}: the job did not resume\n{(folder / 'log-1.txt').read_text()[-4000:]}")
    check(folder, n_ranks)
    return what, seconds


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
    parser.add_argument("--ends", type=int, default=20, help="jobs of which a rank ends in another way")
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
    if options.jobs:
        print(
            f"{total} kills in {options.jobs} jobs, {in_epochs} of them in an epoch: no sample was lost or came twice"
        )
    delays = []
    for _ in range(options.ends):
        with tempfile.TemporaryDirectory() as name:
            folder, url = Path(name), f"{name}/ids.zarr"
            dshuffle.create_dataset(url, {"id": np.arange(SAMPLES)})
            what, seconds = end_early(folder, url, options.ranks, rng)
            delays.append(seconds)
            print(f"{what}: an error on every other rank after {seconds:.1f} s; resumed, each sample once", flush=True)
    if delays:
        print(
            f"{len(delays)} ends: errors after {statistics.median(delays):.1f} s (median), {max(delays):.1f} s at most"
        )


if __name__ == "__main__":
    main()
