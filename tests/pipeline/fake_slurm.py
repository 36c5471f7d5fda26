"""Commands of a batch system that runs jobs on this machine, for tests of what dask-jobqueue asks of Slurm."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SBATCH = """
if [ -e "$home/refusal" ]; then cat "$home/refusal" >&2; exit 1; fi
number=1
while ! mkdir "$home/$number" 2> /dev/null; do number=$((number + 1)); done
cd "$home/$number"
cp "$1" script
echo PENDING > state
if [ ! -e "$home/full" ]; then
    JOB=$number setsid sh -c '
        echo $$ > group
        echo RUNNING > state
        sh script > output 2> errors
        code=$?
        echo $code > code
        [ $code = 0 ] && echo COMPLETED > state || echo FAILED > state
    ' < /dev/null > /dev/null 2>&1 &
fi
echo "Submitted batch job $number"
"""

SQUEUE = """
if [ -e "$home/hangs" ]; then echo $$ > "$home/asleep"; exec sleep 600; fi
[ -e "$home/elsewhere" ] && exit
for job in "$home"/[0-9]*; do
    echo "$(basename "$job")|$(cat "$job/state")|$([ -e "$home/full" ] && echo Resources || echo None)"
done
"""

SCONTROL = """
[ -e "$home/elsewhere" ] && { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
job="$home/$4"
echo "JobId=$4 JobName=dask-worker UserId=somebody($(id -u)) JobState=$(cat "$job/state")" \\
    "Reason=NonZeroExitCode ExitCode=$(cat "$job/code"):0" \\
    "NodeList=w7 StdErr=$job/errors StdIn=/dev/null StdOut=$job/output Power="
"""

SCANCEL = """
[ -e "$home/$1/group" ] && kill -- -"$(cat "$home/$1/group")"
echo CANCELLED > "$home/$1/state"
"""


class FakeSlurm:
    """Commands in a folder, and their jobs.

    Parameters
    ----------
    home
        Folder for the jobs.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.commands = home, home / "bin"
        self.commands.mkdir()
        for name, script in {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            path = self.commands / name
            path.write_text(f"#!/bin/sh\nhome='{home}'\n{script}")
            path.chmod(path.stat().st_mode | stat.S_IEXEC)

    @property
    def path(self) -> str:
        """The variable ``PATH`` with the commands first."""
        return f"{self.commands}:{os.environ['PATH']}"

    @property
    def jobs(self) -> list[Path]:
        """Folders of all jobs that were accepted."""
        return sorted(self.home.glob("[0-9]*"), key=lambda path: int(path.name))

    def refuse(self, words: str) -> None:
        """Refuse all jobs from now on."""
        (self.home / "refusal").write_text(words)

    def be_full(self) -> None:
        """Leave all jobs pending from now on."""
        (self.home / "full").touch()

    def forget(self) -> None:
        """Know no job from now on, as if all were on another cluster."""
        (self.home / "elsewhere").touch()

    def hang(self) -> None:
        """Let ``squeue`` sleep from now on."""
        (self.home / "hangs").touch()

    @property
    def hanging(self) -> int | None:
        """Number of this process; None before it has started."""
        file = self.home / "asleep"
        return int(file.read_text()) if file.exists() and file.read_text().endswith("\n") else None
