"""Pipelines: a dataset, ways of shuffling it, a training and a cluster, as one value that can be checked and run."""

from dshuffle.pipeline.background import PipelineRun
from dshuffle.pipeline.clusters import ClusterSource, LocalWorkers, RunningScheduler
from dshuffle.pipeline.explanation import Explanation
from dshuffle.pipeline.jobs import BatchJobs
from dshuffle.pipeline.pipeline import Pipeline
from dshuffle.pipeline.run import PipelineResult, TrainedWay
from dshuffle.pipeline.training import Training, each_epoch

__all__ = [
    "BatchJobs",
    "ClusterSource",
    "Explanation",
    "LocalWorkers",
    "Pipeline",
    "PipelineResult",
    "PipelineRun",
    "RunningScheduler",
    "TrainedWay",
    "Training",
    "each_epoch",
]
