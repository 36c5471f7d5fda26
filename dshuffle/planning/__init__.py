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
    draw_assignment,
    next_assignment,
    parse_assignment,
)
from dshuffle.planning.assignment.balance import Classes, draw_classes, exchange_in_classes
from dshuffle.planning.assignment.initial import SHARDINGS, GivenSharding, first_assignment
from dshuffle.planning.assignment.stratified import deal_groups, label_codes, stratified_assignment, stratified_ranks
from dshuffle.planning.caching import CACHINGS, CachingPolicy, first_holders
from dshuffle.planning.check_plan import check_plan
from dshuffle.planning.choices import Choices
from dshuffle.planning.delivery import DELIVERIES, Delivery, get_delivery, plan_delivery
from dshuffle.planning.delivery.auto import AUTO, AutoDelivery
from dshuffle.planning.delivery.leftover import leftover_matrix, shuffle_matrix
from dshuffle.planning.delivery.relay import RELAYS, Hops, packets_per_batch, route
from dshuffle.planning.epoch_plan import EpochPlan, WorkerPlan
from dshuffle.planning.holders import as_holders, cache_capacity, held_by, holders_of
from dshuffle.planning.mixing import ShuffleQuality, planned_quality, shuffle_quality
from dshuffle.planning.order import epoch_order, row_permutation
from dshuffle.planning.plan import SERVER, STORE, Plan, demand, name_of
from dshuffle.planning.planner import EpochPlanner, ShufflePlanSpec
from dshuffle.planning.randomness import choose, permutation, random_words

__all__ = [
    "AUTO",
    "AutoDelivery",
    "CACHINGS",
    "DELIVERIES",
    "RELAYS",
    "SERVER",
    "SHARDINGS",
    "STORE",
    "Aligned",
    "Assignment",
    "CachingPolicy",
    "Choices",
    "Chunks",
    "Classes",
    "Delivery",
    "EpochPlan",
    "EpochPlanner",
    "GivenSharding",
    "Global",
    "Hops",
    "Local",
    "Partial",
    "Plan",
    "ShufflePlanSpec",
    "ShuffleQuality",
    "WorkerPlan",
    "as_holders",
    "cache_capacity",
    "check_plan",
    "choose",
    "deal_groups",
    "demand",
    "draw_assignment",
    "draw_classes",
    "epoch_order",
    "get_delivery",
    "exchange_in_classes",
    "first_assignment",
    "first_holders",
    "held_by",
    "holders_of",
    "label_codes",
    "leftover_matrix",
    "name_of",
    "next_assignment",
    "packets_per_batch",
    "parse_assignment",
    "permutation",
    "plan_delivery",
    "planned_quality",
    "random_words",
    "route",
    "row_permutation",
    "shuffle_matrix",
    "shuffle_quality",
    "stratified_assignment",
    "stratified_ranks",
]
