"""Dask-jobqueue: its import, and the options of its classes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import signal
from collections.abc import Iterable, Mapping
from typing import Any

import dask
from distributed import Scheduler
from distributed.utils import get_ip_interface

from dshuffle.errors import InvalidParameter


def jobqueue() -> Any:
    """Import dask-jobqueue.

    Its import sets a handler for SIGINT. So the first one must be in the main thread, and the handler is set back, to
    keep Ctrl-C a KeyboardInterrupt.

    Raises
    ------
    InvalidParameter
        If it is not installed.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module("dask_jobqueue")
    except ImportError as error:
        raise InvalidParameter.because(
            "cluster", f"BatchJobs needs dask-jobqueue ({error})", "Install it: pip install dask-jobqueue"
        ) from error
    finally:
        if signal.getsignal(signal.SIGINT) is not handler:
            signal.signal(signal.SIGINT, handler)


def check_options(cluster_class: type[Any], options: Mapping[str, Any]) -> None:
    """Check the options of a class of dask-jobqueue, without a scheduler and without a job.

    Raises
    ------
    InvalidParameter
        If the class does not have an option or refuses a value, or this machine does not have the network interface.
    """
    job_class = cluster_class.job_cls
    of_jobs = _parameters(job_class)
    _check_names("options", options, of_jobs | _parameters(cluster_class), f"an option of {cluster_class.__name__}")
    section = options.get("config_name") or job_class.default_config_name()
    sections = dask.config.get("jobqueue")
    if section not in sections:
        raise InvalidParameter.of(
            "options['config_name']", section, f"a section of the setting jobqueue, which has {', '.join(sections)}"
        )
    scheduler = options.get("scheduler_options") or sections[section].get("scheduler-options") or {}
    _check_names("options['scheduler_options']", scheduler, _parameters(Scheduler), "a parameter of Dask's Scheduler")
    interface = options.get("interface") or sections[section].get("interface")
    if "host" not in scheduler and (interface := scheduler.get("interface", interface)):
        try:
            get_ip_interface(interface)
        except ValueError as error:
            raise InvalidParameter.because(
                "options['interface']",
                str(error),
                'If it has another name on this machine, add "scheduler_options": {"host": ADDRESS}.',
            ) from error
    job = {name: value for name, value in options.items() if name in of_jobs and name != "security"}
    try:
        job_class("tcp://address-of-the-scheduler:0", **{**job, "name": "check"}).job_script()
    except (TypeError, ValueError, OSError) as error:
        raise InvalidParameter.because("options", f"{cluster_class.__name__} refuses them: {error}") from error


def _check_names(parameter: str, names: Iterable[str], allowed: set[str], what: str) -> None:
    for name in names:
        if name not in allowed:
            alike = difflib.get_close_matches(name, allowed, 1)
            hint = f"Did you mean {alike[0]!r}?" if alike else f"These exist: {', '.join(sorted(allowed))}."
            raise InvalidParameter.of(parameter, name, what, hint)


def _parameters(cls: type[Any]) -> set[str]:
    """Names of the parameters of a class, whose constructors pass what they do not know to those of its bases."""
    constructors = [inspect.signature(vars(base)["__init__"]) for base in cls.__mro__ if "__init__" in vars(base)]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name
        for constructor in constructors
        for name, parameter in constructor.parameters.items()
        if name != "self" and parameter.kind in named
    }
