"""Imported by the process that workers of a local cluster are forked from: what sessions and trainers need."""

from distributed import nanny  # noqa: F401

from dshuffle.runtime.worker.worker_plugin import load_ahead
from dshuffle.training import linear_regression  # noqa: F401

load_ahead(True)
