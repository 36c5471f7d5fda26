from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle import errors
from dshuffle.cli import main
from dshuffle.cli.options import ASSIGNMENTS, TABLE
from dshuffle.planning import DELIVERIES
from dshuffle.planning.assignment import known_assignments

TOO_HEAVY = ["dask", "distributed", "zarr", "numba", "numpy", "scipy", "sklearn", "pandas", "xarray", "bokeh", "rich"]
HELPS = [[], *([name] for name in main.commands)]
HELPS += [["dataset", name] for name in ("create", "info", "shuffle", "verify")]


def test_help_and_version_load_nothing_heavy():
    code = (
        f"import sys, dshuffle.cli\n"
        f"for words in {[['--version'], *([*words, '--help'] for words in HELPS)]!r}:\n"
        f"    try: dshuffle.cli.main(words)\n"
        f"    except SystemExit as exit: print('loaded:', exit.code, sorted({{*{TOO_HEAVY!r}}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[0].endswith(version("dshuffle"))
    assert dshuffle.__version__ == version("dshuffle")
    usages = [line.removeprefix("Usage: -c").strip() for line in lines if line.startswith("Usage: ")]
    assert [usage.partition("[")[0].strip() for usage in usages] == [" ".join(words) for words in HELPS], done.stderr
    loaded = [line for line in lines if line.startswith("loaded:")]
    assert loaded == ["loaded: 0 []"] * (len(HELPS) + 1), done.stderr


def test_help_lists_the_names_of_the_registries():
    """The options repeat the names, so that help need not load planning."""
    assert known_assignments().replace("'", "") == ASSIGNMENTS
    assert TABLE["delivery"]["help"] == f"{', '.join(DELIVERIES)} or auto. May be repeated."


def test_the_package_is_a_command_too():
    done = subprocess.run(
        [sys.executable, "-m", "dshuffle", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("python -m dshuffle")


def options_of(command):
    if isinstance(command, click.Group):
        return [option for one in command.commands.values() for option in options_of(one)]
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def test_few_commands_and_options():
    assert set(main.commands) == {"run", "compare", "advise", "dataset", "doctor", "warmup"}
    assert len(options_of(main)) <= 55


def test_our_errors_are_one_line_and_tracebacks_on_demand(tmp_path, monkeypatch):
    arguments = ["dataset", "info", str(tmp_path / "nothing.zarr")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "nothing.zarr" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    monkeypatch.setenv("DSHUFFLE_DEBUG", "1")
    assert isinstance(CliRunner().invoke(main, arguments).exception, FileNotFoundError)


def test_few_names_are_at_the_top_and_errors_say_where_they_are():
    assert len(dshuffle.__all__) <= 35
    classes = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
    }
    top = {"ClusterError", "DShuffleError", "DatasetError", "ExchangeError", "InvalidParameter"}
    assert classes & {*dshuffle.__all__} == top
    for name in classes - top:
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; it is in dshuffle\.errors$"):
            getattr(dshuffle, name)


@pytest.mark.slow
def test_kernels_are_compiled_ahead():
    ran = CliRunner().invoke(main, ["warmup"], catch_exceptions=False)
    assert ran.exit_code == 0
    assert re.search(r"Kernels are compiled \([\d.]+ m?s\); the cache is beside the installed modules\.", ran.stdout)
