"""The files of a report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from dshuffle.report.folder import make_folder
from dshuffle.report.html import render_html
from dshuffle.report.summary import Comparison, to_dict, write_records
from dshuffle.report.verdict import verdict


def write_report(comparison: Comparison, directory: str | Path) -> Path:
    """Write ``report.html``, ``records.jsonl`` and ``summary.json``, and replace existing files.

    Existing files are replaced only when all new ones are complete.

    Parameters
    ----------
    comparison
        Measured comparison.
    directory
        Folder of the report; created if it does not exist.

    Returns
    -------
    Path
        Path of ``report.html``.
    """
    folder = Path(directory)
    make_folder(folder)
    summary = json.dumps(to_dict(comparison, verdict(comparison)), indent=2)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=folder) as new:
        (Path(new) / "report.html").write_text(render_html(comparison), encoding="utf-8")
        write_records(comparison, Path(new) / "records.jsonl")
        (Path(new) / "summary.json").write_text(summary + "\n", encoding="utf-8")
        for path in Path(new).iterdir():
            path.replace(folder / path.name)
    return folder / "report.html"
