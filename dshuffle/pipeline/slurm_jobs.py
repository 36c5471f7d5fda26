"""What Slurm says about jobs: their states, and how those ended that it still knows.

It says this of the jobs of its own cluster. Those that ``sbatch --clusters`` sends to another one are not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from pathlib import Path

from dshuffle.pipeline.job_records import State

RUNNING = {"COMPLETING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
"""States of ``squeue`` in which a job has begun and not ended."""

PENDING = {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD"}
"""States in which it has not begun."""

ANSWER_WITHIN = 30.0
"""Seconds in which a command of Slurm must end. A busy controller lets it wait."""

LOG_LINES = 20
"""Lines of a log that an error quotes."""

LOG_BYTES = 20_000
"""Bytes at the end of a log that are read for them."""


async def states() -> dict[str, tuple[State | None, str]]:
    """State of each of this user's jobs, None if it has ended, and the reason that Slurm gives.

    Slurm forgets jobs some minutes after their end (``MinJobAge``).

    Raises
    ------
    OSError
        If ``squeue`` cannot be run, or has no answer.
    """
    command = "squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%T|%r"
    rows = [line.split("|", 2) for line in (await _output(*command)).splitlines()]
    return {number: (_state(name), "" if reason == "None" else reason) for number, name, reason in rows}


def _state(name: str) -> State | None:
    return State.RUNNING if name in RUNNING else State.PENDING if name in PENDING else None


async def ending(number: str) -> str:
    """Say how a job has ended, with the last lines of its log.

    Raises
    ------
    OSError
        If ``scontrol`` cannot be run, has no answer, or does not know this job of this user.
    """
    shown = await _output("scontrol", "--oneliner", "show", "job", number)
    fields = dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w/:]+=|\s*$)", shown))
    if not (user := fields.get("UserId", "")).endswith(f"({os.getuid()})"):
        raise OSError(f"scontrol: job {number} belongs to {user}")  # a job on another cluster may have the same number
    words = f"{fields.get('JobState', '')}, exit code {fields.get('ExitCode', '')}, on {fields.get('NodeList', '')}"
    return f"{words}. {log_end(log_name(fields.get('StdErr', ''), number))}"


def log_name(pattern: str, number: str) -> str:
    """The name of a batch job's log. Slurm 22 shows it with some of the patterns that ``sbatch`` takes.

    Examples
    --------
    >>> log_name("/logs/dask-worker-%J.err", "17")
    '/logs/dask-worker-17.err'
    """
    return re.sub("%[jJA]", number, pattern)


def log_end(name: str) -> str:
    """Quote the last lines of a log that this machine can read."""
    path = Path(name)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = deque(file.read().decode(errors="replace").splitlines(), LOG_LINES)
    except OSError as error:
        return f"Its log {name} cannot be read here ({error.strerror})"
    return f"The end of its log {name}:\n" + "\n".join(f"    {line}" for line in lines if line.strip())


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            output, errors = await process.communicate()
    except TimeoutError:
        raise TimeoutError(f"{command[0]} has not answered within {ANSWER_WITHIN:g} s") from None
    finally:
        if process.returncode is None:  # it is late, or nobody waits for it any more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a command may be a script that has started others
            await process.wait()
    if process.returncode:
        raise OSError(f"{command[0]}: {errors.decode(errors='replace').strip()}")
    return output.decode(errors="replace")
