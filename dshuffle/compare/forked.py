"""Imported by the process that workers of a local cluster are forked from: what sessions and trainers need."""

from distributed import nanny  # noqa: F401

from dshuffle.runtime.worker.preload import load_worker
from dshuffle.training import linear_regression  # noqa: F401

load_worker()
