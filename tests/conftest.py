"""What concerns all tests: how many examples hypothesis draws, worker processes that start in no time, and PyTorch."""

import gc
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import dask
import pytest
from _pytest.doctest import DoctestModule
from distributed.utils import get_mp_context
from hypothesis import settings

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import compile_kernels
from dshuffle.planning.assignment import ASSIGNMENTS, parse_assignment

# No deadlines: the first call of a kernel compiles it, or loads it from numba's cache. No module loads a profile of its
# own: it would count for all modules that are collected after it.
settings.register_profile("whole", deadline=None, max_examples=50)
settings.register_profile("quick", deadline=None, max_examples=10)

QUICK_SEEDS = 4
"""Seeds from which on the quick part leaves them out, where a test runs with many."""

MANY = 500
"""Tests from which on compiling first pays: the processes of a cluster would each compile the same kernels."""


def at_most(examples: int) -> settings:
    """As many examples as the profile draws, or fewer: for tests whose examples are slow."""
    return settings(max_examples=min(examples, settings.default.max_examples))


def written(rule: str, *, fraction: float = 0.3, rows: int | None = 2) -> str:
    """How an assignment of the registry is written: its name, with a fraction or a number of rows if it needs one."""
    for text in (rule, f"{rule}:{fraction}", f"{rule}:{rows}"):
        try:
            parsed = parse_assignment(text)
        except InvalidParameter:
            continue
        return text if rows is None or parsed.unit is not None else str(parsed.with_unit(rows))
    raise AssertionError(f"no example of the assignment {rule!r}, which is written {ASSIGNMENTS[rule].forms}")


def is_quick(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    # Nobody looks at these profiles, and dozens of workers in one process would each make a hundred a second.
    dask.config.set({"distributed.worker.profile.enabled": False})
    # Nor at the processor and the loop of each worker, which would take a thirtieth of a processor from the tests.
    dask.config.set({"distributed.admin.system-monitor.interval": "10s", "distributed.admin.tick.interval": "1s"})
    # A cluster closes the nanny of a worker that is away at the end of this time. Being back in between does not count,
    # so a worker that is killed twice in two tests would not come back.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})
    settings.load_profile("quick" if is_quick(config) else "whole")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """No doctests from tests and benchmarks, which have none: to look for them imports every one of their modules."""
    collectors = yield
    return [one for one in collectors if not isinstance(one, DoctestModule)]


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch. Tests that need it ask for this fixture and are skipped without it; `-m torch` selects them.

    With `DSHUFFLE_REQUIRE_TORCH=1` in the environment, they fail without it.
    """
    if os.environ.get("DSHUFFLE_REQUIRE_TORCH") == "1":
        return importlib.import_module("torch")
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "torch" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.torch)
    if is_quick(config):
        seeds = {item: getattr(item, "callspec", None) and item.callspec.params.get("seed") for item in items}
        more = [item for item, seed in seeds.items() if isinstance(seed, int) and seed >= QUICK_SEEDS]
        config.hook.pytest_deselected(items=more)
        items[:] = [item for item in items if item not in more]


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    # What thousands of tests consist of stays until the end: no collection need look at it again.
    gc.collect()
    gc.freeze()
    if is_quick(config) or config.getoption("collectonly"):
        return
    if len(session.items) >= MANY:
        compile_kernels()
    fork_workers()


def fork_workers() -> None:
    """Fork worker processes from one that has imported and compiled everything.

    A cluster of three workers and its first exchange take half a second then, instead of six. Users get what Dask
    does by default, a new interpreter for each worker; tests that run a command or a script as a process of its own
    have those. (Forked ones start without what nannies put into the environment, such as `OMP_NUM_THREADS`.)
    """
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    context = get_mp_context()
    context.set_forkserver_preload(["warm_worker"])
    folder = str(Path(__file__).parent / "preload")
    sys.path.append(folder)  # Python 3.13 hands it on
    with pytest.MonkeyPatch.context() as patch:  # earlier ones do not
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        forkserver.ensure_running()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds, some seconds at most."""

    def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.02)

    return eventually


def in_a_fork(call: Callable[[], object]) -> str:
    """What a call says in a forked process, within some seconds."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads and fork: it is what this test is about
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            text = f"returned {call()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return text
