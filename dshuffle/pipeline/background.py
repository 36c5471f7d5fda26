"""A pipeline that runs in a thread, while the program goes on."""

from __future__ import annotations

import threading

from dshuffle.errors import ClusterError, InvalidParameter, RunCancelled
from dshuffle.pipeline.run import PipelineResult, Runnable, execute, n_preparations


class PipelineRun:
    """A pipeline that runs in the background, in a thread of this process.

    Parameters
    ----------
    pipeline
        The pipeline.
    """

    def __init__(self, pipeline: Runnable) -> None:
        self.pipeline = pipeline
        self._cancelled = threading.Event()
        total = n_preparations(pipeline) + len(pipeline.ways) * pipeline.training.epochs
        self._progress = (0, total, "starting")
        self._result: PipelineResult | None = None
        self._resumed: PipelineRun | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dshuffle-pipeline", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        done, total, text = self._progress
        state = f"{done} of {total}, {text}"
        if self.done:
            state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        return f"<PipelineRun {state}>"

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, int, str]:
        """Number of preparations and epochs that are done, of all, and what is going on. In pairs of runs: of pairs."""
        return self._progress

    def cancel(self) -> None:
        """End the run after the current epoch, or while it waits for its first workers.

        A checkpoint stays, so that the pipeline can be run again from it.
        """
        self._cancelled.set()

    def resume(self) -> PipelineRun:
        """Run the pipeline again in the background, from its checkpoint, after this run was cancelled or has failed.

        Raises
        ------
        InvalidParameter
            If the pipeline has no checkpoint.
        ClusterError
            If this run has not ended, or has a result.
        """
        if self.pipeline.checkpoint is None:
            raise InvalidParameter.of("checkpoint", None, "a URL", "Without one, a run cannot be continued.")
        if not self.done or self._result is not None:
            state = "has its result" if self.done else "has not ended. Cancel it first"
            raise ClusterError(f"this run cannot be continued: it {state}", transient=False)
        if self._resumed is None:  # two runs would write the same checkpoint
            self._resumed = PipelineRun(self.pipeline)
        return self._resumed

    def result(self, timeout: float | None = None) -> PipelineResult:
        """Wait for the result.

        Parameters
        ----------
        timeout
            Seconds to wait; None for as long as it takes.

        Raises
        ------
        TimeoutError
            If the run has not ended in time. It goes on.
        RunCancelled
            If the run was cancelled.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the pipeline has not ended after {timeout:g} s: {self!r}")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ClusterError("the thread of the pipeline has ended without a result")
        return self._result

    def _run(self) -> None:
        try:
            self._result = execute(self.pipeline, self._advance, self._check)
        except BaseException as error:  # raised where the result is asked for
            self._error = error

    def _advance(self, done: int, total: int, text: str) -> None:
        self._progress = done, total, text

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise RunCancelled("the run of the pipeline was cancelled")
