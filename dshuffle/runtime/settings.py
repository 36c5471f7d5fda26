"""The settings of dshuffle in Dask's configuration, with their times, sizes and switches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import dask
from dask.utils import parse_bytes, parse_timedelta

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES


def as_seconds(name: str, value: object, *, positive: bool = False) -> float:
    """Return the seconds of a parameter or setting, which is a number or text such as ``"5m"``."""
    seconds = float(_number(value, parse_timedelta))
    if not seconds >= 0 or (positive and not 0 < seconds < math.inf):
        allowed = "a positive time" if positive else "a time of at least 0"
        raise InvalidParameter.of(name, value, f'{allowed}: seconds, or text such as "5m"')
    return seconds


def as_nbytes(name: str, value: object) -> int:
    """Return the bytes of a parameter or setting, which is an integer or text such as ``"2 GiB"``."""
    nbytes = _number(value, parse_bytes if isinstance(value, str) else float)
    if not (1 <= nbytes < math.inf and nbytes == int(nbytes)):
        raise InvalidParameter.of(name, value, 'a positive number of bytes, such as "2 GiB" or 2**31')
    return int(nbytes)


def as_fraction(name: str, value: object) -> float:
    """Return a number within (0, 1], which may be text."""
    number: float = _number(value, float)
    if not 0 < number <= 1:
        raise InvalidParameter.of(name, value, "a number within (0, 1]")
    return number


def as_switch(name: str, value: object) -> bool:
    """Return a parameter or setting that is either on or off."""
    if not isinstance(value, bool):
        raise InvalidParameter.of(name, value, "True or False")
    return value


def _number(value: object, parse: Callable[[Any], Any]) -> Any:
    """What ``parse`` makes of a number, or of text with a digit; NaN if that fails."""
    # Dask takes "" for one byte, and "ms" for a millisecond.
    if re.search(r"\d", value) if isinstance(value, str) else isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(KeyError, ValueError, OverflowError):
            return parse(value)
    return math.nan


[DEFAULTS] = dask.config.collect_yaml([str(Path(__file__).parents[1] / "dshuffle.yaml")])
"""All settings and their defaults, as they are in Dask's configuration."""

dask.config.update_defaults(DEFAULTS)


@dataclass(frozen=True, slots=True)
class Settings:
    """Memory and time limits of the exchange.

    Parameters
    ----------
    message_bytes
        Size of a full message. Below 4 MiB the fixed cost per message becomes noticeable; above 10 MiB Dask handles the
        message in its single offload thread.
    window_bytes
        Limit for the bytes that a worker has requested and not yet unpacked, and also for the bytes that it has packed
        and that are not yet acknowledged. With coded deliveries it always allows one message of one row per worker.
    timeout
        Seconds after which a request for a message counts as failed. Also the time to wait for workers.
    memory_fraction
        Fraction of a worker's memory limit that its cache partition may take if ``memory_limit`` is not given.
    heartbeat
        Seconds without a word after which a worker that owes an answer counts as lost, unless its process is known to
        run.
    paused_timeout
        Seconds after which a task fails whose worker is paused by Dask.
    replacement_timeout
        Seconds to wait for another worker to take the rank of a lost one.
    shared_memory
        Whether long messages between workers of one host pass through memory that they share. Otherwise they use the
        network, like messages between hosts.
    new_workers
        Whether the cluster starts new workers in place of lost ones, so that it is worth waiting for them although none
        is starting yet. By default it is so if the client's cluster is adaptive.
    stopped_timeout
        Seconds without a word after which a worker counts as lost if a task runs on it and it has no nanny. A nanny
        could tell whether its process runs.
    """

    message_bytes: int = MESSAGE_BYTES
    window_bytes: int = WINDOW_BYTES
    timeout: float = 300.0
    memory_fraction: float = 0.6
    heartbeat: float = 15.0
    paused_timeout: float = 60.0
    replacement_timeout: float = 60.0
    shared_memory: bool = True
    new_workers: bool = False
    stopped_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.window_bytes < self.message_bytes:
            raise InvalidParameter.of(
                "dshuffle.window-bytes",
                self.window_bytes,
                f"at least one message ({self.message_bytes} bytes)",
            )

    @classmethod
    def from_config(cls, *, adaptive: bool = False) -> Settings:
        """Read ``dshuffle.message-bytes``, ``.timeout`` and so on: the names of the fields, with hyphens.

        ``adaptive`` says whether the client's cluster is adaptive, which is the default of ``dshuffle.new-workers``.
        """
        known = DEFAULTS["dshuffle"]
        for key in dask.config.get("dshuffle"):
            if (name := key.replace("_", "-")) not in known:
                hint = f"There are: {', '.join(known)}."
                raise InvalidParameter.because(f"dshuffle.{name}", "dshuffle does not have this setting", hint)
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(cls):
            name = f"dshuffle.{entry.name.replace('_', '-')}"
            value = dask.config.get(name)
            value = adaptive if entry.name == "new_workers" and value is None else value
            read = as_fraction if entry.name == "memory_fraction" else _READ[str(entry.type)]
            values[entry.name] = read(name, value)
        return cls(**values)

    @property
    def window(self) -> int:
        """The window in messages."""
        return self.window_bytes // self.message_bytes

    @property
    def messages_nbytes(self) -> int:
        """Bytes that messages may take: a window of requests and one of answers, and another in shared memory."""
        return (3 if self.shared_memory else 2) * self.window_bytes


_READ: dict[str, Callable[[str, object], Any]] = {
    "int": as_nbytes,
    "float": functools.partial(as_seconds, positive=True),
    "bool": as_switch,
}
"""How a setting is read from its name and value, by its type."""
