"""What a way of shuffling costs on a cluster: seconds and bytes of an epoch, before anything runs.

``work.py`` says what is to be moved and ``cluster.py`` how fast; loads are bytes on every part of the cluster, counted
in a real plan (``exact.py``) or expected from formulas (``expected.py``, ``packets.py``); ``prediction.py`` makes times
of them, and ``advice.py`` compares ways and says which one to take, why, and what would change that.
"""

from dshuffle.planning.cost.advice import Change, Recommendation, all_ways, compare_costs, recommend
from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.prediction import Prediction, predict

__all__ = [
    "Change",
    "Cluster",
    "Prediction",
    "Recommendation",
    "Work",
    "all_ways",
    "compare_costs",
    "predict",
    "recommend",
]
