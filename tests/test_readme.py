"""The README's example runs as it stands, and what it says of the project is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dshuffle.planning import DELIVERIES
from dshuffle.records import EpochRecord
from dshuffle.runtime.session_spec import Settings

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    *epochs, record = ran.stdout.splitlines()
    assert len(epochs) == 3
    assert EpochRecord.from_json(record).epoch == 2
    assert ran.stderr == ""


def test_the_table_names_every_delivery():
    [header] = [line for line in README.read_text().splitlines() if line.startswith("| | `")]
    assert re.findall(r"`(\w+)`", header) == sorted(name for name, delivery in DELIVERIES.items() if not delivery.coded)


def test_defaults_are_those_of_the_settings():
    rows = dict(re.findall(r"^\| `dshuffle\.([\w-]+)` \| ([\d.]+)", README.read_text(), re.MULTILINE))
    default = Settings()
    assert {name: float(value) for name, value in rows.items()} == {
        "message-bytes": default.message_bytes / 2**20,
        "window-bytes": default.window_bytes / 2**20,
        "timeout": default.timeout,
        "memory-fraction": default.memory_fraction,
    }
