"""The profiles of networks and stores: complete, plausible, and each figure with its source."""

import math
import tomllib
from pathlib import Path

FILE = Path(__file__).parents[2] / "storage" / "profiles.toml"
PROFILES = tomllib.loads(FILE.read_text())

LINKS = [f"{end}_{way}_bytes_per_second" for end in ("link", "server") for way in ("up", "down")]
STORE = [
    "storage_bytes_per_second",
    "storage_client_bytes_per_second",
    "storage_connection_bytes_per_second",
    "storage_request_seconds",
    "storage_requests_per_second",
]


def test_profiles_are_complete_and_the_header_names_every_key():
    wanted = {f"ethernet-{rate}g" for rate in (1, 10, 25, 100)} | {"nfs", "lustre", "s3", "efs", "local-testbed"}
    assert set(PROFILES) == wanted
    header = FILE.read_text().partition("\n[")[0]
    assert all(f"#   {key} " in header for key in ["description", *LINKS, *STORE])
    for profile in PROFILES.values():
        assert set(profile) == {"description", "source", *LINKS, *STORE}
        assert set(profile["source"]) == {*LINKS, *STORE}
        assert all(len(source) > 8 for source in profile["source"].values())
        assert all(profile[key] > 0 and (math.isfinite(profile[key]) or key in STORE) for key in LINKS + STORE)
        rates = [profile[f"storage_{of}bytes_per_second"] for of in ("connection_", "client_", "")]
        assert rates == sorted(rates)
