"""The memory of a worker that its sessions have reserved for their partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from distributed import Worker

from dshuffle.runtime.memory import WorkerMemory
from dshuffle.runtime.metrics import reserved


class ReservedMemory(Mapping[str, int]):
    """Session -> bytes of its partition.

    Parameters
    ----------
    worker
        The Dask worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._nbytes: dict[str, int] = {}

    def __getitem__(self, session_id: str) -> int:
        return self._nbytes[session_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nbytes)

    def __len__(self) -> int:
        return len(self._nbytes)

    def memory(self, loaded: Collection[str]) -> WorkerMemory:
        """The memory of the process, for a check that another partition fits.

        Parameters
        ----------
        loaded
            Sessions whose partitions are full. The memory of the others is not yet part of the process's.
        """
        manager = self._worker.memory_manager
        loading = sum(nbytes for session_id, nbytes in self._nbytes.items() if session_id not in loaded)
        return WorkerMemory(
            limit=manager.memory_limit,
            pause_fraction=manager.memory_pause_fraction or None,
            process_nbytes=self._worker.monitor.get_process_memory() + loading,
            reserved=dict(self._nbytes),
        )

    def reserve(self, session_id: str, nbytes: int) -> None:
        """Reserve the memory of a session."""
        self.release(session_id)  # of an opening that was cancelled
        self._nbytes[session_id] = nbytes
        reserved(session_id, nbytes)

    def release(self, session_id: str) -> None:
        """Free the memory of a session."""
        if (nbytes := self._nbytes.pop(session_id, None)) is not None:
            reserved(session_id, -nbytes)
