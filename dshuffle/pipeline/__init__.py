"""Pipelines: a dataset, ways of shuffling it, a training and a cluster, as one value that can be checked and run."""

from dshuffle.compare.clusters import ClusterSource, LocalWorkers, RunningScheduler
from dshuffle.pipeline.jobs import BatchJobs
from dshuffle.pipeline.pipeline import Pipeline, PipelineResult, TrainedWay
from dshuffle.pipeline.training import Training, each_epoch

__all__ = [
    "BatchJobs",
    "ClusterSource",
    "LocalWorkers",
    "Pipeline",
    "PipelineResult",
    "RunningScheduler",
    "TrainedWay",
    "Training",
    "each_epoch",
]
