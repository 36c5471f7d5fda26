"""Profiles of real networks and stores, for clusters that one does not have.

They are in ``storage/profiles.toml`` of a checkout, which a wheel brings along as ``dshuffle/profiles.toml``.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

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
"""What a profile must say of a cluster -> whether it may be infinite. Rates are payload: headers are taken off."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A network and a store.

    Parameters
    ----------
    name
        As the user wrote it.
    description
        What it describes.
    rates
        A number for each of :data:`KEYS`.
    sources
        Where each figure comes from.
    """

    name: str
    description: str
    rates: dict[str, float]
    sources: dict[str, str]


def shipped() -> Path:
    """The file of profiles that comes with dshuffle."""
    package = Path(str(dshuffle.__file__)).parent
    installed = package / "profiles.toml"
    return installed if installed.exists() else package.parent / "storage" / "profiles.toml"


def load_profile(name: str) -> Profile:
    """A profile by name, or by ``FILE#NAME`` for one of a file of one's own.

    Raises
    ------
    InvalidParameter
        If there is no such file or profile, or one of its rates is missing or no number above 0.
    """
    file, _, table = name.rpartition("#")
    path = Path(file) if file else shipped()
    try:
        profiles = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidParameter.of("profile", name, f"in a readable TOML file; {path}: {error}") from error
    profile = profiles.get(table)
    if not isinstance(profile, dict):
        raise InvalidParameter.of("profile", name, f"one of {', '.join(sorted(profiles))}", f"They are in {path}.")
    rates = {}
    for key, infinite in KEYS.items():
        if key not in profile:
            raise InvalidParameter.of("profile", name, f"one with {key!r}, which it lacks", f"Add it in {path}.")
        value = profile[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= math.inf:
            raise InvalidParameter.of(f"profile {name!r}: {key}", value, "a number above 0")
        if math.isinf(value) and not infinite:
            raise InvalidParameter.of(f"profile {name!r}: {key}", value, "a finite number above 0")
        rates[key] = float(value)
    sources = profile.get("source", {})
    return Profile(name, str(profile.get("description", table)), rates, sources if isinstance(sources, dict) else {})
