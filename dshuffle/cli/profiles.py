"""Profiles: measured rates of real networks and stores, for predictions without a cluster.

The profiles are in ``storage/profiles.toml`` of a checkout. A wheel contains them as ``dshuffle/profiles.toml``.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click

import dshuffle
from dshuffle.errors import InvalidParameter

KEYS = {
    "link_up_bytes_per_second": False,
    "link_down_bytes_per_second": False,
    "server_up_bytes_per_second": False,
    "storage_bytes_per_second": True,
    "storage_client_bytes_per_second": True,
    "storage_connection_bytes_per_second": True,
    "storage_request_seconds": False,
    "storage_requests_per_second": True,
}
"""Required keys of a profile, and whether each may be infinite. Rates are payload rates, without headers."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of a network and a store.

    Parameters
    ----------
    name
        Name as the user wrote it.
    description
        Description of the network and the store.
    rates
        One number for each of :data:`KEYS`.
    sources
        Source of each figure.
    """

    name: str
    description: str
    rates: dict[str, float]
    sources: dict[str, str]


def shipped() -> Path:
    """Return the path of the profiles that come with dshuffle."""
    package = Path(str(dshuffle.__file__)).parent
    installed = package / "profiles.toml"
    return installed if installed.exists() else package.parent / "storage" / "profiles.toml"


def list_profiles() -> None:
    """Print the name and the description of each profile that comes with dshuffle."""
    formatter = click.HelpFormatter()
    formatter.write_dl(
        [(name, profile["description"]) for name, profile in tomllib.loads(shipped().read_text()).items()]
    )
    click.echo(formatter.getvalue(), nl=False)


def load_profile(name: str) -> Profile:
    """Load a profile by ``NAME``, or by ``FILE#NAME`` from another file.

    Raises
    ------
    InvalidParameter
        If the file or the profile does not exist, or a rate is missing or not a number above 0.
    """
    file, _, table = name.rpartition("#")
    path = Path(file) if file else shipped()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        hint = f"{path} cannot be read: {error}"
        raise InvalidParameter.of("profile", name, "a profile in a readable TOML file", hint) from error
    profile = profiles.get(table)
    if not isinstance(profile, dict):
        raise InvalidParameter.of(
            "profile", name, f"one of {', '.join(sorted(profiles))}", f"The profiles are in {path}."
        )
    rates = {}
    for key, infinite in KEYS.items():
        if key not in profile:
            raise InvalidParameter.of("profile", name, f"a profile with the key {key!r}", f"Add the key in {path}.")
        value = profile[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= math.inf:
            raise InvalidParameter.of(f"profile {name!r}: {key}", value, "a number above 0")
        if math.isinf(value) and not infinite:
            raise InvalidParameter.of(f"profile {name!r}: {key}", value, "a finite number above 0")
        rates[key] = float(value)
    sources = profile.get("source", {})
    return Profile(name, str(profile.get("description", table)), rates, sources if isinstance(sources, dict) else {})
