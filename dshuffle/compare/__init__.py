"""Compare strategies: the strategies, their results, and the clusters that they run on."""

from dshuffle.compare.clusters import AS_THEY_ARE, EmulatedRates, connect, local_cluster
from dshuffle.compare.comparison import Way, default_ways, product_of_ways
from dshuffle.compare.pairs import HeldOut, falling, regression_in_pairs, run_in_pairs, stable_step
from dshuffle.compare.simulated import SimulatedCluster
from dshuffle.kernels import compile_kernels
from dshuffle.noninferiority import PairedOutcome, PairedRuns, PairedTest
from dshuffle.runtime.client.cluster_view import count_training_workers

__all__ = [
    "AS_THEY_ARE",
    "EmulatedRates",
    "HeldOut",
    "PairedOutcome",
    "PairedRuns",
    "PairedTest",
    "SimulatedCluster",
    "Way",
    "compile_kernels",
    "connect",
    "count_training_workers",
    "default_ways",
    "falling",
    "local_cluster",
    "product_of_ways",
    "regression_in_pairs",
    "run_in_pairs",
    "stable_step",
]
