"""``dshuffle run``: run a pipeline that a Python file or a module describes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import math
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dshuffle.cli.options import Command, say, say_if_replaced, shared, warnings_as_lines
from dshuffle.errors import InvalidParameter
from dshuffle.units import ERROR_DIGITS, METRIC_DIGITS, UNKNOWN, human_bytes, human_numbers, human_seconds

if TYPE_CHECKING:
    from dshuffle.pipeline import Pipeline, PipelineResult

NAME = "pipeline"
"""Name of the pipeline in a file, unless another one is given."""


@click.command(cls=Command)
@click.argument("target")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
@shared("scheduler")
@click.option(
    "--workers",
    metavar="NAMES",
    help="Names or addresses of the workers that train, separated by commas.  [default: all, or those of the pipeline]",
)
@click.option(
    "--shares",
    metavar="SHARES",
    help="Samples of each worker, in all strategies: even, measured, or numbers by rank (4,4,1) or name (old=0.25).",
)
@click.option("--report", type=click.Path(file_okay=False), help="Folder for the report.")
@shared("json")
def run(
    target: str,
    arguments: tuple[str, ...],
    scheduler: str | None,
    workers: str | None,
    shares: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Run a pipeline from a Python file or a module.

    TARGET is FILE.py, FILE.py:NAME or MODULE:NAME. NAME is a dshuffle.Pipeline, or a function that returns one; by
    default "pipeline". Each NAME=VALUE is an argument of the function. VALUE is a JSON value or plain text.

    With --json, each line is the record of an epoch with what training reported after it, or has the metrics and the
    pairs of runs of a way.
    """
    from dshuffle.pipeline import RunningScheduler
    from dshuffle.planning.shares import parse_shares

    pipeline = pipeline_of(target, keywords(arguments))
    changes: dict[str, Any] = {} if report is None else {"report": report}
    if scheduler is not None:
        changes["cluster"] = RunningScheduler(scheduler)
    if shares is not None:
        policy = parse_shares(shares)
        changes["shuffle"] = [
            dataclasses.replace(way, choices=dataclasses.replace(way.choices, shares=policy)) for way in pipeline.ways
        ]
    if workers is not None:
        names = tuple(name.strip() for name in workers.split(","))
        changes["session"] = dataclasses.replace(pipeline.options, workers=names)
    pipeline = dataclasses.replace(pipeline, **changes)
    if pipeline.report is not None:
        say_if_replaced(Path(pipeline.report), "--report")
    output = redirect_stdout(sys.stderr) if as_json else nullcontext()  # what functions of the user print is not JSON
    logger, lines = logging.getLogger("dshuffle.pipeline"), LogLines()
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        with warnings_as_lines(), output:
            result = pipeline.run()
    finally:
        logger.removeHandler(lines)
    click.echo("\n".join(json_lines(result) if as_json else lines_of(result, pipeline.training.error_meaning)))


class LogLines(logging.Handler):
    """Prints what a logger says."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        say(record.getMessage().removeprefix("dshuffle: "))


def pipeline_of(target: str, arguments: dict[str, Any]) -> Pipeline:
    """Find a pipeline by ``FILE.py``, ``FILE.py:NAME`` or ``MODULE:NAME``."""
    from dshuffle.pipeline import Pipeline

    place, _, name = target.rpartition(":") if ":" in target else (target, "", NAME)
    is_file, allowed = place.endswith(".py"), "FILE.py, FILE.py:NAME or MODULE:NAME, of a file or module that exists"
    if not place or not name or (is_file and not Path(place).is_file()):
        raise InvalidParameter.of("TARGET", target, allowed)
    sys.path.insert(0, str(Path(place).resolve().parent) if is_file else os.getcwd())  # as Python does
    if is_file:
        # Not "__main__", so that the file does not run itself. Functions of a name that cannot be imported are sent to
        # workers by value.
        names = runpy.run_path(place, run_name="dshuffle_pipeline")
    else:
        try:
            names = vars(importlib.import_module(place))
        except ImportError as error:
            raise InvalidParameter.of("TARGET", target, allowed, str(error)) from error
    if name not in names:
        candidates = ", ".join(sorted(name for name, value in names.items() if isinstance(value, Pipeline)))
        hint = f"It has the pipelines {candidates}." if candidates else "It does not define a pipeline."
        raise InvalidParameter.because("TARGET", f"{place} has no name {name!r}", hint)
    value = names[name]
    if callable(value):
        signature = inspect.signature(value)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            hint = f"Give the arguments of {name}{signature} as NAME=VALUE after the target."
            raise InvalidParameter.because("NAME=VALUE", f"{error} of {name} in {place}", hint) from None
        value = value(**arguments)
    elif arguments:
        raise InvalidParameter.of("NAME=VALUE", sorted(arguments), f"left out, as {name} in {place} is not a function")
    if not isinstance(value, Pipeline):
        raise InvalidParameter.because("TARGET", f"{name} in {place} is {value!r:.60} and not a dshuffle.Pipeline")
    return value


def keywords(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Parse arguments of the form ``NAME=VALUE``."""
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidParameter.of("argument", argument, "of the form NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def lines_of(result: PipelineResult, error_meaning: str) -> list[str]:
    """The records of all strategies with their errors and metrics, and the metrics after the last epoch, as text."""
    from dshuffle.records import shares_in_words, slow_rank_of

    def in_words(metrics: Mapping[str, float]) -> str:
        return "".join(f", {name} {human_numbers([value], METRIC_DIGITS)[0]}" for name, value in metrics.items())

    has_errors = any(math.isfinite(point.error) for way in result.ways for point in way.points)
    lines = [f"The error is {error_meaning}."] if has_errors else []
    for way in result.ways:
        errors = human_numbers([None if math.isnan(point.error) else point.error for point in way.points], ERROR_DIGITS)
        said = {
            point.epoch: (f", error {error}" if error != UNKNOWN else "") + in_words(point.validation)
            for point, error in zip(way.points, errors, strict=True)
        }
        lines.append(f"{way.label}, {way.n_workers} workers")
        lines += [
            f"  epoch {record.epoch} ({record.delivery}): exchange {human_seconds(record.exchange_seconds)} "
            f"({human_bytes(record.wire_bytes)} on the wire), training {human_seconds(record.training_seconds)}, "
            f"waited {human_seconds(record.waited_seconds)}{said.get(record.epoch, '')}"
            for record in way.records
        ]
        pairs = "" if way.pairs is None else f"{way.pairs.test.metric}: {way.pairs}"
        words = shares_in_words(way.records), slow_rank_of(way.records), in_words(way.metrics)[2:], pairs
        lines += [f"  {text}" for text in words if text]
    if result.report is not None:
        lines.append(f"Report: {result.report}")
    return lines


def json_lines(result: PipelineResult) -> list[str]:
    """The records of all strategies, each with what training reported after it, then metrics and pairs, as JSON."""
    from dshuffle.report.summary import finite, records_of

    lines: list[str] = []
    for way in result.ways:
        lines += records_of(way.label, way.records, way.points)
        answer: dict[str, Any] = {"metrics": finite(way.metrics)} if way.metrics else {}
        if way.pairs is not None:
            answer["pairs"] = way.pairs.to_dict()
        if answer:
            lines.append(json.dumps({"way": way.label, **answer}))
    return lines
