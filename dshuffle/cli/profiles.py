"""Profiles of real networks and stores, for clusters that one does not have.

They are in ``storage/profiles.toml`` of a checkout, which a wheel brings along as ``dshuffle/profiles.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dshuffle
from dshuffle.errors import InvalidParameter

KEYS = (
    "link_bytes_per_second",
    "server_bytes_per_second",
    "storage_bytes_per_second",
    "storage_client_bytes_per_second",
    "request_seconds",
)
"""What a profile may say about a cluster."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Some rates under a name, perhaps of several profiles taken together.

    Parameters
    ----------
    name
        As the user wrote it.
    rates
        Some of :data:`KEYS`.
    sources
        Where each figure comes from.
    """

    name: str
    rates: dict[str, float]
    sources: tuple[str, ...]

    def needs(self, key: str, option: str) -> float:
        """A rate that must be there.

        Raises
        ------
        InvalidParameter
            Naming the profile, the key, and the option that could stand in.
        """
        if key not in self.rates:
            allowed = f"one with {key!r} (it has {', '.join(sorted(self.rates)) or 'no rate'})"
            raise InvalidParameter.of("profile", self.name, allowed, f"Give {option} beside it.")
        return self.rates[key]


def shipped() -> Path:
    """The file of profiles that comes with dshuffle."""
    package = Path(str(dshuffle.__file__)).parent
    installed = package / "profiles.toml"
    return installed if installed.exists() else package.parent / "storage" / "profiles.toml"


def load_profiles(names: Sequence[str]) -> Profile:
    """Profiles by name; of several, such as a network's and a store's, later ones add to earlier ones.

    Parameters
    ----------
    names
        ``NAME``, or ``FILE#NAME`` for one of a file of one's own.

    Raises
    ------
    InvalidParameter
        If there is no such file or profile, or a rate is no number above 0.
    """
    rates: dict[str, float] = {}
    sources: list[str] = []
    for name in names:
        file, _, table = name.rpartition("#")
        found = _read(Path(file) if file else shipped(), table, name)
        rates |= {key: _rate(name, key, found[key]) for key in KEYS if key in found}
        if "source" in found:
            sources.append(f"{table}: {found['source']}")
    return Profile(", ".join(names), rates, tuple(sources))


def _read(path: Path, table: str, name: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidParameter.of("profile", name, f"in a readable TOML file; {path}: {error}") from error
    # A file may sort its profiles into kinds: [name], or [kind.name].
    profiles = {key: value for key, value in tables.items() if isinstance(value, dict)}
    for key, value in list(profiles.items()):
        profiles |= {f"{below}": inner for below, inner in value.items() if isinstance(inner, dict)}
        if any(isinstance(inner, dict) for inner in value.values()):
            del profiles[key]
    if table not in profiles:
        raise InvalidParameter.of("profile", name, f"one of {', '.join(sorted(profiles))}")
    return dict(profiles[table])


def _rate(profile: str, key: str, value: object) -> float:
    least = "a number of at least 0" if key == "request_seconds" else "bytes a second, above 0"
    if isinstance(value, int | float) and (value > 0 or (value == 0 and key == "request_seconds")):
        return float(value)
    raise InvalidParameter.of(f"profile {profile!r}: {key}", value, least)
