"""Common code of the storage services: start, check, record and stop them; and the commands of each script."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import places
from places import Place


def local_folder() -> Path:
    """Return the state folder of services that run on this machine without a testbed."""
    if os.geteuid() == 0:
        return Path("/run/dshuffle-services")
    return Path(os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())) / f"dshuffle-services-{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class Service:
    """A storage service that one command starts.

    Parameters
    ----------
    name
        Name of the service, and prefix of its processes' names.
    programs
        Debian package of each program that it needs.
    launch
        Function that starts the processes on a place, with data in a directory, for clients on other places. Returns
        the service's URL once it answers.
    check
        Function that checks the service at a URL from a client, and raises an error if it does not work.
    script
        Path of the script with its commands.
    ports
        Ports on which it listens; they must be free.
    root
        Reason why it needs root; empty if it does not.
    before_stop
        Function that cleans up the clients before the processes are stopped.
    """

    name: str
    programs: Mapping[str, str]
    launch: Callable[[Place, Path, Sequence[Place]], str]
    check: Callable[[str], str]
    script: str
    ports: tuple[int, ...]
    root: str = ""
    before_stop: Callable[[Place, Sequence[Place]], None] | None = None

    def start(self, place: Place, directory: Path, clients: Sequence[Place] = ()) -> str:
        """Start the service, check it from a client, and return a message that says how to use it.

        If anything fails, no process is left running.

        Raises
        ------
        click.ClickException
            If a package is missing, the service is already running, or the check fails.
        """
        places.need_programs(self.programs, self.name)
        if self.root:
            places.need_root(self.name, self.root)
        if self.running(place):
            raise click.ClickException(f"{self.name} is already running on {place.name}. Stop it first.")
        if taken := [port for port in self.ports if place.listens(port)]:
            raise click.ClickException(f"ports {taken} of {place.address} are used by another program")
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        try:
            url = self.launch(place, directory, clients)
            seconds = time.monotonic() - begun
            client = clients[0] if clients else place
            verdict = client.run(sys.executable, self.script, "check", url).strip()
        except BaseException as error:
            self.stop(place, clients)
            if isinstance(error, click.ClickException):
                _, _, said = error.message.rpartition("Error: ")  # the check runs as a command
                raise click.ClickException(f"{self.name} was not started: {said}") from error
            raise
        with place.state.change() as content:
            content.setdefault("services", {})[self.name] = {"url": url, "directory": str(directory)}
        return f"{self.name} started in {seconds:.1f} s: {verdict}"

    def stop(self, place: Place, clients: Sequence[Place] = ()) -> list[str]:
        """Stop the service and return the names of the processes that were running."""
        if self.before_stop:
            self.before_stop(place, clients)
        stopped = places.stop(place.state, f"{self.name}.")
        with place.state.change() as content:
            content.get("services", {}).pop(self.name, None)
        return stopped

    def dead(self, place: Place) -> list[str]:
        """Return the names of its processes that exited without being stopped."""
        return [name for name, record in self._processes(place).items() if not places.alive(record)]

    def running(self, place: Place) -> bool:
        """Whether any of its processes is running."""
        return len(self.dead(place)) < len(self._processes(place))

    def _processes(self, place: Place) -> dict[str, dict[str, Any]]:
        return {name: record for name, record in place.state.processes().items() if name.startswith(f"{self.name}.")}


def commands(service: Service, place: Callable[[], Place], about: str) -> click.Group:
    """Return the commands ``start DIR``, ``stop``, ``status`` and ``check URL`` for a service on this machine."""

    @click.group(help=about)
    def group() -> None:
        pass

    @group.command()
    @click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
    def start(directory: Path) -> None:
        """Start the service with its data in DIRECTORY, check it, and print how to use it."""
        click.echo(service.start(place(), directory))

    @group.command()
    def stop() -> None:
        """Stop the service and keep its data."""
        click.echo(f"stopped: {', '.join(service.stop(place())) or 'nothing was running'}")

    @group.command()
    def status() -> None:
        """Print whether the service is running, and check it."""
        here = place()
        known = here.state.read().get("services", {}).get(service.name)
        if known is None:
            raise click.ClickException(f"{service.name} is not running")
        if dead := service.dead(here):  # the check would wait for minutes on a mount without a server
            raise click.ClickException(
                f"these processes have exited: {', '.join(dead)}. Stop and restart {service.name}."
            )
        click.echo(f"{known['directory']}: {service.check(known['url'])}")

    @group.command()
    @click.argument("url")
    def check(url: str) -> None:
        """Check the service at URL from the host where this command runs."""
        click.echo(service.check(url))

    return group
