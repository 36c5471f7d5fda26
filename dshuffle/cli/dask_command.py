"""The command ``dask dshuffle``. While it is looked for, dshuffle's settings are added to ``dask config list``."""

import dshuffle.runtime.settings as _  # noqa: F401
from dshuffle.cli import main as main
