"""Settings from ``dask.config`` (keys ``dshuffle.*``), read once on the client and sent along with the session."""

from __future__ import annotations

from dataclasses import dataclass

import dask
from dask.utils import parse_bytes, parse_timedelta

from dshuffle.errors import InvalidParameter
from dshuffle.planning.relay import MESSAGE_BYTES, WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Settings:
    """How the exchange uses memory and time.

    Parameters
    ----------
    message_bytes
        Size of a full message. Below 4 MiB the cost of a message shows; above 10 MiB Dask hands it to its one
        offload thread.
    window_bytes
        Bytes that a worker has asked for and not yet unpacked, and bytes packed and not yet acknowledged: each at
        most so many. With coded deliveries at least one message of a row for every worker.
    timeout
        Seconds after which a request for a message counts as failed, and for which workers are waited for.
    memory_fraction
        Share of a worker's memory limit that its cache partition may take when ``memory_limit`` is not given.
    """

    message_bytes: int = MESSAGE_BYTES
    window_bytes: int = WINDOW_BYTES
    timeout: float = 300.0
    memory_fraction: float = 0.6

    def __post_init__(self) -> None:
        if self.message_bytes < 1:
            raise InvalidParameter.of("dshuffle.message-bytes", self.message_bytes, "at least 1 byte")
        if self.window_bytes < self.message_bytes:
            raise InvalidParameter.of(
                "dshuffle.window-bytes",
                self.window_bytes,
                f"at least one message ({self.message_bytes} bytes)",
            )
        if not self.timeout > 0:
            raise InvalidParameter.of("dshuffle.timeout", self.timeout, "a positive time")
        if not 0 < self.memory_fraction <= 1:
            raise InvalidParameter.of("dshuffle.memory-fraction", self.memory_fraction, "within (0, 1]")

    @classmethod
    def from_config(cls) -> Settings:
        """Read ``dshuffle.message-bytes``, ``.window-bytes``, ``.timeout`` and ``.memory-fraction``."""
        default = cls()
        return cls(
            message_bytes=parse_bytes(dask.config.get("dshuffle.message-bytes", default.message_bytes)),
            window_bytes=parse_bytes(dask.config.get("dshuffle.window-bytes", default.window_bytes)),
            timeout=parse_timedelta(dask.config.get("dshuffle.timeout", default.timeout)),
            memory_fraction=float(dask.config.get("dshuffle.memory-fraction", default.memory_fraction)),
        )

    @property
    def window(self) -> int:
        """The window in messages."""
        return self.window_bytes // self.message_bytes
