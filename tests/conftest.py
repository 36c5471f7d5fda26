"""How many examples hypothesis draws: the quick part fewer, so that it stays quick."""

import pytest
from hypothesis import settings

# No deadlines: the first call of a kernel compiles it, or loads it from numba's cache.
settings.register_profile("whole", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if config.getoption("markexpr") == "not slow" else "whole")
