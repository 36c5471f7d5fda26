"""The reader that measures stores, on a folder and with URLs that cannot be read."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "storage" / "read_rate.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_a_folder(tmp_path):
    measured = run(str(tmp_path), "--megabytes", "2", "--processes", "2")
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}: [1-9]\d* Mbit/s, processors \d+% idle\n", measured.stdout)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [256 << 10] * 7


def test_urls_without_an_export_are_refused():
    refused = run("nfs://10.78.0.4", "--megabytes", "1", "--processes", "1")
    assert refused.returncode == 1
    assert "Error: 'nfs://10.78.0.4' is not allowed; it must be like nfs://10.78.0.4/shared" in refused.stderr


def test_an_export_that_cannot_be_mounted_is_an_error():
    """Also where the C library is missing, and never a rate of files that were not written."""
    failed = run("nfs://127.0.0.1/no-such-export", "--megabytes", "1", "--processes", "1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert re.search(r"Error: nfs://(127.0.0.1/no-such-export: | URLs need the C library libnfs)", failed.stderr)
