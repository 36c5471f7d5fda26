"""What concerns all tests: how many examples hypothesis draws, and kernels that are compiled once."""

import pytest
from hypothesis import settings

from dshuffle.planning import DELIVERIES
from dshuffle.training import compile_kernels

# No deadlines: the first call of a kernel compiles it, or loads it from numba's cache.
settings.register_profile("whole", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)

MANY = 500
"""Tests from which on compiling first pays: the processes of a cluster would each compile the same kernels."""


def is_quick(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not slow")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if is_quick(config) else "whole")


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if len(session.items) >= MANY and not is_quick(config) and not config.getoption("collectonly"):
        compile_kernels(DELIVERIES)
