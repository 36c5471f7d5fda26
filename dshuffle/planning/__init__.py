"""Plan who trains on what and who sends what to whom, as pure functions of shapes, seed and epoch.

Nothing here does I/O or knows of Dask or Zarr. Every result is the same on every machine and with every NumPy version.
"""

from dshuffle.planning.assignment import (
    Aligned,
    Assignment,
    Chunks,
    Global,
    Local,
    Partial,
    parse_assignment,
)
from dshuffle.planning.assignment.balance import Classes
from dshuffle.planning.assignment.rules import SHARDINGS, GivenSharding, first_ranks
from dshuffle.planning.assignment.slots import NEW, WorkerHistory
from dshuffle.planning.caching import CACHINGS
from dshuffle.planning.delivery import DELIVERIES, AutoDelivery, Delivery, get_delivery
from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.epoch_plan import SERVER, STORE, EpochPlan, Packets, WorkerPart, name_of
from dshuffle.planning.exchange_epochs import ExchangeEpochs, row_permutation
from dshuffle.planning.planner import Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.remainder import Remainder
from dshuffle.planning.types import holders_of

__all__ = [
    "Aligned",
    "Assignment",
    "AutoDelivery",
    "CACHINGS",
    "Choices",
    "Chunks",
    "Classes",
    "DELIVERIES",
    "Delivery",
    "EpochPlan",
    "EpochPlanner",
    "ExchangeEpochs",
    "GivenSharding",
    "Global",
    "Local",
    "NEW",
    "Packets",
    "Partial",
    "RELAYS",
    "Remainder",
    "SERVER",
    "SHARDINGS",
    "STORE",
    "ShuffleSpec",
    "WorkerHistory",
    "WorkerPart",
    "first_ranks",
    "get_delivery",
    "holders_of",
    "name_of",
    "parse_assignment",
    "row_permutation",
]
