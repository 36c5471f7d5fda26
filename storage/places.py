"""Machines to run commands on, and a JSON file that records the processes started there.

A :class:`Place` is this machine or a host of the testbed. Processes are identified by process id and start time, so
a process that reuses an old id is never killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class State:
    """A folder with ``state.json`` and the logs of the recorded processes."""

    folder: Path

    def read(self) -> dict[str, Any]:
        """Return the content of the state file; empty if it does not exist."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """Change the state under a file lock, and replace the file atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = self.read()
            yield content
            draft = self.folder / "state.json.new"
            draft.write_text(json.dumps(content, indent=1))
            draft.replace(self.folder / "state.json")

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / "logs" / f"{name}.log"

    def processes(self) -> dict[str, dict[str, Any]]:
        """Return the processes that were started and not stopped, by name, whether running or not."""
        found: dict[str, dict[str, Any]] = self.read().get("processes", {})
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """A machine to run commands on.

    Parameters
    ----------
    name
        Name of the host.
    address
        Address on which its servers listen.
    state
        Record of the processes started there.
    enter
        Command prefix that runs a command on the host.
    environment
        Environment variables of all commands.
    """

    name: str
    address: str
    state: State
    enter: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def _call(self, command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        return [*self.enter, *command], {**os.environ, **self.environment, **environment}

    def run(self, *command: str, environment: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """Run a command and return its output.

        Raises
        ------
        click.ClickException
            If the command fails or takes longer than ``timeout`` seconds.
        """
        line, variables = self._call(command, environment or {})
        return run(line, environment=variables, timeout=timeout)

    def succeeds(self, *command: str) -> bool:
        """Whether a command exits with status 0."""
        line, variables = self._call(command, {})
        return subprocess.run(line, env=variables, capture_output=True, check=False).returncode == 0

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a process that outlives this one; its output goes to the log of that name."""
        line, variables = self._call(command, environment or {})
        log = self.state.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        # Nothing waits for the process to end, and a Popen object would warn about that.
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        python_ignores = (signal.SIGPIPE, signal.SIGXFSZ)
        with self.state.change() as content:
            pid = os.posix_spawnp(line[0], line, variables, file_actions=files, setsid=True, setsigdef=python_ignores)
            record = {"pid": pid, "started": start_time(pid), "host": self.name, "command": command}
            content.setdefault("processes", {})[name] = record

    def await_port(self, name: str, port: int, address: str | None = None) -> None:
        """Wait until the process ``name`` listens on a port."""
        self.await_true(name, lambda: self.listens(port, address), f"to listen on port {port}")

    def listens(self, port: int, address: str | None = None) -> bool:
        """Whether a process listens on a port."""
        return self.succeeds("bash", "-c", f"exec 3<>/dev/tcp/{address or self.address}/{port}")

    def await_true(self, name: str, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Wait for a condition that a started process brings about.

        Raises
        ------
        click.ClickException
            If the process exits, or the condition is not true in time. The message contains the end of its log.
        """
        give_up = time.monotonic() + seconds
        while not condition():
            ended = not alive(self.state.processes()[name])
            if ended or time.monotonic() > give_up:
                problem = "exited" if ended else f"did not within {seconds:.0f} s"
                raise click.ClickException(f"waited for {name} {what}, but it {problem}:\n{tail(self.state.log(name))}")
            time.sleep(0.05)


def this_machine(folder: Path, address: str = "127.0.0.1") -> Place:
    """Return this machine as a place."""
    return Place("localhost", address, State(folder))


def run(line: list[str], *, environment: Mapping[str, str] | None = None, timeout: float = 60) -> str:
    """Run a command line and return its output; on failure, raise an error with the command's message."""
    try:
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"`{' '.join(line)}` did not finish within {timeout:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise click.ClickException(f"`{' '.join(line)}` failed with exit status {done.returncode}: {said}")
    return done.stdout


def need_programs(packages: Mapping[str, str], what: str) -> None:
    """Check that programs are installed, before anything is changed.

    Parameters
    ----------
    packages
        Debian package of each program.
    what
        Name of the service that needs them, for the message.
    """
    missing = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if missing:
        raise click.ClickException(f"{what} needs programs that are not installed: apt-get install {' '.join(missing)}")


def need_root(what: str, why: str) -> None:
    """Check that the user is root, before anything is changed."""
    if os.geteuid() != 0:
        raise click.ClickException(f"{what} needs root ({why}), and this is user {os.geteuid()}. Run it with sudo.")


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot, or ``None`` if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def alive(record: Mapping[str, Any]) -> bool:
    """Whether a recorded process is still running."""
    return record["started"] is not None and start_time(record["pid"]) == record["started"]


def stop(state: State, prefix: str = "", host: str | None = None) -> list[str]:
    """Stop recorded processes in reverse order of their start: terminate them, then kill them after a timeout.

    Parameters
    ----------
    state
        Record of the processes.
    prefix
        Prefix of the names of processes to stop.
    host
        Host whose processes to stop; ``None`` for all hosts.

    Returns
    -------
    list of str
        Names of the processes that were running.
    """
    chosen = {
        name: record
        for name, record in state.processes().items()
        if name.startswith(prefix) and host in (None, record["host"])
    }
    running = [name for name in reversed(chosen) if alive(chosen[name])]
    for name in running:
        _end(chosen[name])
    if chosen:
        with state.change() as content:
            for name in chosen:
                content["processes"].pop(name, None)
    return running


def _end(record: Mapping[str, Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(record["pid"], number)
        except ProcessLookupError:
            return
        give_up = time.monotonic() + PATIENCE_SECONDS
        while alive(record) and time.monotonic() < give_up:
            time.sleep(0.02)


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no log at {log})"
