"""The profiles of networks and stores: complete, plausible, and each figure with its source."""

import math
import tomllib
from pathlib import Path

import pytest

PROFILES = tomllib.loads((Path(__file__).parents[2] / "storage" / "profiles.toml").read_text())

LINKS = [f"{end}_{way}_bytes_per_second" for end in ("link", "server") for way in ("up", "down")]
STORE = [
    "storage_bytes_per_second",
    "storage_client_bytes_per_second",
    "storage_connection_bytes_per_second",
    "storage_request_seconds",
    "storage_requests_per_second",
]


def test_what_the_issue_asks_for_is_there():
    wanted = {f"ethernet-{rate}g" for rate in (1, 10, 25, 100)} | {"nfs", "lustre", "s3", "efs", "local-testbed"}
    assert set(PROFILES) == wanted


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_complete(name):
    profile = PROFILES[name]
    assert set(profile) == {"description", "source", *LINKS, *STORE}
    assert set(profile["source"]) == {*LINKS, *STORE}
    assert all(len(source) > 8 for source in profile["source"].values())
    for key in LINKS + STORE:
        value = profile[key]
        assert not isinstance(value, bool)
        assert value > 0
        assert math.isfinite(value) or key in STORE
    assert profile["storage_connection_bytes_per_second"] <= profile["storage_client_bytes_per_second"]
    assert profile["storage_client_bytes_per_second"] <= profile["storage_bytes_per_second"]


def test_the_header_names_every_key():
    header = (Path(__file__).parents[2] / "storage" / "profiles.toml").read_text().partition("\n[")[0]
    assert all(f"#   {key} " in header for key in ["description", *LINKS, *STORE])
