"""Cost model: predict the seconds and bytes of an epoch on a cluster, before anything runs.

``job.py`` describes the samples and the way of shuffling them, ``cluster.py`` the rates of the cluster. Loads are bytes
on every part of the cluster. The deliveries count them in a real plan (``loads_counted.py``) or compute them from
formulas (``loads_expected.py``). ``prediction.py`` converts loads to times.
``advice.py`` compares ways and recommends one, and ``explain.py`` puts the reasons into words. ``prices.py`` says what
bytes and requests cost.
"""

from dshuffle.planning.cost.advice import ASSIGNMENTS, Change, Recommendation, all_ways, compare_costs, recommend
from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.prediction import Prediction, predict
from dshuffle.planning.cost.prices import Bill

__all__ = [
    "ASSIGNMENTS",
    "Bill",
    "Change",
    "ClusterRates",
    "Prediction",
    "Recommendation",
    "Work",
    "all_ways",
    "compare_costs",
    "predict",
    "recommend",
]
