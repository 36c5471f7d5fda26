"""What the storage services share: started on a place, checked, recorded, stopped; and the commands of each script."""

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
    """State of the services that run on this machine without a testbed."""
    if os.geteuid() == 0:
        return Path("/run/dshuffle-services")
    return Path(os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())) / f"dshuffle-services-{os.geteuid()}"


@dataclass(frozen=True, slots=True)
class Service:
    """A storage service that one command starts.

    Parameters
    ----------
    name
        Prefix of its processes' names.
    programs
        The Debian package of each program that it needs.
    launch
        Starts the processes on a place, with data in a directory, for clients on other places, and returns the
        service's URL once it answers.
    check
        Raises unless what answers at a URL is what it claims to be. Runs where clients are.
    script
        The file with its commands.
    ports
        Where it listens; nobody else may.
    root
        Why it needs root, if it does.
    before_stop
        What to undo on the clients before the processes are stopped.
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
        """Start, check from a client's side, and return the URL; if anything fails, nothing is left running.

        Raises
        ------
        click.ClickException
            A package is missing, it runs already, or what answers is not what it should be.
        """
        places.need_programs(self.programs, self.name)
        if self.root:
            places.need_root(self.name, self.root)
        if self.running(place):
            raise click.ClickException(f"{self.name} already runs on {place.name}. Stop it first.")
        if taken := [port for port in self.ports if place.listens(port)]:
            raise click.ClickException(f"ports {taken} of {place.address} are taken by another program")
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
                _, _, said = error.message.rpartition("Error: ")  # of the check, which is a command like others
                raise click.ClickException(f"{self.name} was not started: {said}") from error
            raise
        with place.state.change() as content:
            content.setdefault("services", {})[self.name] = {"url": url, "directory": str(directory)}
        return f"{self.name} started in {seconds:.1f} s: {verdict}"

    def stop(self, place: Place, clients: Sequence[Place] = ()) -> list[str]:
        """Stop what runs; returns the names of the processes that did."""
        if self.before_stop:
            self.before_stop(place, clients)
        stopped = places.stop(place.state, f"{self.name}.")
        with place.state.change() as content:
            content.get("services", {}).pop(self.name, None)
        return stopped

    def dead(self, place: Place) -> list[str]:
        """Its processes that ended without having been stopped."""
        return [name for name, record in self._processes(place).items() if not places.alive(record)]

    def running(self, place: Place) -> bool:
        """Whether one of its processes lives."""
        return len(self.dead(place)) < len(self._processes(place))

    def _processes(self, place: Place) -> dict[str, dict[str, Any]]:
        return {name: record for name, record in place.state.processes().items() if name.startswith(f"{self.name}.")}


def commands(service: Service, place: Callable[[], Place], about: str) -> click.Group:
    """``start DIR``, ``stop``, ``status`` and ``check URL`` for one service on this machine."""

    @click.group(help=about)
    def group() -> None:
        pass

    @group.command()
    @click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
    def start(directory: Path) -> None:
        """Start it with its data in DIRECTORY, check it, and print how to use it."""
        click.echo(service.start(place(), directory))

    @group.command()
    def stop() -> None:
        """Stop it. Its data stay."""
        click.echo(f"stopped: {', '.join(service.stop(place())) or 'nothing was running'}")

    @group.command()
    def status() -> None:
        """Say whether it runs, and check what answers."""
        here = place()
        known = here.state.read().get("services", {}).get(service.name)
        if known is None:
            raise click.ClickException(f"{service.name} is not running")
        if dead := service.dead(here):  # a mount whose server is gone would let the check wait for minutes
            raise click.ClickException(f"ended by themselves: {', '.join(dead)}. Stop it, and start it again.")
        click.echo(f"{known['directory']}: {service.check(known['url'])}")

    @group.command()
    @click.argument("url")
    def check(url: str) -> None:
        """Check, where this command runs, that URL is what it claims to be."""
        click.echo(service.check(url))

    return group
