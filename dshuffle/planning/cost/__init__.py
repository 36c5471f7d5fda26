"""Cost model: predict the seconds and bytes of an epoch on a cluster, before anything runs.

``job.py`` describes the samples and the way of shuffling them, ``cluster.py`` the rates of the cluster. Loads
(``loads.py``) are bytes on every part of the cluster. They are counted in a real plan (``loads_counted.py``) or
computed from formulas (``loads_expected.py``, ``expected_packets.py``). ``prediction.py`` converts loads to times.
``advice.py`` compares ways and recommends one, and ``explain.py`` puts the reasons into words.
"""

from dshuffle.planning.cost.advice import Change, Recommendation, all_ways, compare_costs, recommend
from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.prediction import Prediction, predict

__all__ = [
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
