"""The README's example runs as it stands, and what the tables of the docs say of the project is so."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import dask
import pytest
import yaml

from dshuffle import errors
from dshuffle.errors import InvalidParameter
from dshuffle.planning import DELIVERIES
from dshuffle.runtime.settings import DEFAULTS, Settings

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
needs_docs = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not here")


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    *epochs, record = ran.stdout.splitlines()
    assert len(epochs) == 3
    assert record.startswith("<EpochRecord 2: global + peer; workers 2")
    # A busy machine may take more than three seconds for something, which is said.
    assert [line for line in ran.stderr.splitlines() if not line.startswith("dshuffle: ")] == []


@needs_docs
def test_the_table_names_every_delivery():
    page = (DOCS / "strategies.md").read_text()
    [header] = [line for line in page.splitlines() if line.startswith("| | `")]
    assert re.findall(r"`([\w-]+)`", header) == sorted(
        name for name, delivery in DELIVERIES.items() if not delivery.coded
    )


@needs_docs
def test_the_table_names_every_coded_delivery():
    page = (DOCS / "coded-deliveries.md").read_text()
    [table] = re.findall(r"^\| `delivery` \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    named = [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(name for name, delivery in DELIVERIES.items() if delivery.coded)


@needs_docs
def test_every_exception_is_explained():
    page = (DOCS / "errors.md").read_text()
    names = {
        name for name, found in vars(errors).items() if isinstance(found, type) and found.__module__ == errors.__name__
    }
    tree, tables = page.split("## Parameters and datasets")
    assert names == set(re.findall(r"^[ │├└─]*(\w+)(?=$|  )", tree.split("```")[1], re.MULTILINE))
    assert names - {"DShuffleError"} <= set(re.findall(r"`(\w+)`", tables))


@needs_docs
def test_defaults_are_those_of_the_settings():
    page = (DOCS / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `dshuffle\.([\w-]+)` \| ([\d.]+)", page, re.MULTILINE))
    default = Settings()
    expected = {name.replace("_", "-"): value for name, value in dataclasses.asdict(default).items()}
    assert expected.pop("new-workers") is False
    assert expected.pop("shared-memory") is True
    assert "| `dshuffle.shared-memory` | true |" in page
    assert "| `dshuffle.new-workers` | whether the client's cluster is adaptive |" in page
    expected |= {name: value / 2**20 for name, value in expected.items() if name.endswith("-bytes")}
    assert {name: float(value) for name, value in rows.items()} == expected


@needs_docs
def test_the_settings_are_those_of_dask():
    """The file of defaults, the table of the docs, what is read, and what `dask config list` shows are the same.

    Dask adds each command of its entry points by the name of the command, not by that of the entry point.
    """
    assert Settings.from_config() == Settings()
    names = {f"dshuffle.{name}" for name in DEFAULTS["dshuffle"]}
    assert names == set(re.findall(r"^\| `(dshuffle\.[\w-]+)` \|", (DOCS / "settings.md").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["dask_cli"]["dshuffle"].partition(":")
    code = f"from dask.cli import cli; from {module} import {name} as command; cli.add_command(command); "
    code += "cli(['config', 'list'], standalone_mode=False); print('---'); cli(['dshuffle', 'advise', '--help'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, _, helped = ran.stdout.partition("---")
    assert "dshuffle advise [OPTIONS] [DATASET]" in helped
    assert yaml.safe_load(shown)["dshuffle"] == DEFAULTS["dshuffle"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("timeoot", r"dshuffle.timeoot is not allowed: dshuffle does not have this setting. There are: .*timeout,"),
        ("window_byte", "There are: message-bytes, window-bytes, timeout,"),
    ],
)
def test_unknown_settings_are_refused_with_all_names(key, words):
    with dask.config.set({f"dshuffle.{key}": 3}), pytest.raises(InvalidParameter, match=words):
        Settings.from_config()
