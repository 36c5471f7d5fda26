"""Synchronous SGD with PyTorch: DistributedDataParallel inside Dask workers (extra ``torch``)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter
from dshuffle.runtime import Epoch, Shuffler, gathered
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.training.fit import (
    CONSTANT,
    EarlyStopping,
    EpochBreakdown,
    History,
    OnEpoch,
    PhaseSeconds,
    Recorder,
    SavedFit,
    Schedule,
    Validate,
    raises_once,
    with_records,
)
from dshuffle.training.inputs import check_encryption, check_fixed_workers
from dshuffle.training.torch_rank import (
    Fit,
    MakeModel,
    MakeOptimizer,
    MissingModel,
    end,
    load_state,
    read_state,
    state_of,
    torch,
    train,
    where,
)
from dshuffle.training.torch_step import Loss, OwnFunction, OwnStep, SupervisedStep, TrainingStep

logger = logging.getLogger(__name__)

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OWN_OPTIONS = {"module", "device_ids", "output_device", "process_group", "broadcast_buffers", "forward_sync_buffers"}
"""Options of DistributedDataParallel that the fit sets itself."""

ATTEMPTS = 3
"""How often an epoch is trained, if the worker of rank 0 is lost each time before it has sent the model."""


@raises_once
def fit_torch_ddp(
    shuffler: Shuffler,
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    *,
    epochs: int,
    batch_size: int,
    loss: Loss | None = None,
    metric: Callable[..., Any] | None = None,
    training_step: OwnFunction | None = None,
    arrays: Sequence[str] | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    ddp_options: Mapping[str, Any] = NO_OPTIONS,
    device: Any = None,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[torch.nn.Module] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
    timeout: float = 1800.0,
    plain_tcp: bool = False,
) -> History[torch.nn.Module]:
    """Train a PyTorch module with DistributedDataParallel, with one rank in every Dask worker process.

    Parameters
    ----------
    loss
        Function from the module's output and the targets to the mean loss over a mini-batch. An output that differs
        from the targets only in axes of length 1, such as ``(n, 1)`` and ``(n,)``, takes their shape. Other shapes
        that the loss would broadcast are refused. By default ``torch.nn.functional.cross_entropy``.
    features, target
        Names of arrays in the dataset, ``(q, ...)``; floats must be finite. The module and the loss get them with the
        dtypes of the dataset. Cast features in the module's ``forward`` and targets in the loss, if they need others.
        Only integer labels become int64, if the loss does not accept them as they are.

    Notes
    -----
    If mini-batches differ in size, their gradients are weighted by the number of samples. Batch norm is local to each
    rank. Running statistics are averaged over ranks at the end of each epoch (DistributedDataParallel would use those
    of rank 0). Module and optimizer stay on the workers between epochs.

    If a worker is lost and replaced, the epoch starts again on all ranks, from the module and the optimizer at its
    beginning, of which every worker keeps copies. The result is the same except for rounding. Ranks notice a stopped
    worker, whose connections stay open, only after ``timeout``.

    With a checkpoint (``Shuffler(checkpoint=...)``), module and optimizer are sent to this process and kept in the
    checkpoint after every epoch. A session that continues from it continues the fit. Another kind of optimizer is
    refused. Warnings say which sizes of batches differ, and which options of the optimizer stay as they were: all but
    the learning rate, as in ``Optimizer.load_state_dict``.

    gloo listens on a free port of each worker's host, on the interface with the worker's address, unless
    ``GLOO_SOCKET_IFNAME`` names another interface.

    References
    ----------
    Nguyen et al. (2022), Figures 3 to 5; see docs/papers.md. S. Li et al., "PyTorch distributed", VLDB 2020.
    """
    as_integer("epochs", epochs, 1)
    as_integer("batch_size", batch_size, 1)
    as_integer("accumulate", accumulate, 1)
    as_integer("seed", seed)
    if max_grad_norm is not None and not 0 < max_grad_norm < float("inf"):
        raise InvalidParameter.of("max_grad_norm", max_grad_norm, "None, or a finite number > 0")
    if own_options := OWN_OPTIONS & set(ddp_options):
        name = min(own_options)
        raise InvalidParameter.because(
            f"ddp_options[{name!r}]", "fit_torch_ddp sets it itself", "Leave it out of ddp_options."
        )
    if accumulate > 1 and ddp_options.get("static_graph"):
        raise InvalidParameter.because(
            "accumulate", "a static graph cannot leave out the averaging of gradients", "Leave out static_graph."
        )
    step = _step(training_step, arrays, loss, metric, features, target)
    if not 0 < timeout < float("inf"):
        raise InvalidParameter.of("timeout", timeout, "a finite number of seconds > 0")
    check_fixed_workers(shuffler, "fit_torch_ddp")
    check_encryption(shuffler.addresses[0], plain_tcp)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model().eval()
    recorder: Recorder[Any] = Recorder(validate, early_stopping, on_epoch)
    state: bytes | None = None
    kept = shuffler.checkpoint is not None or isinstance(shuffler.attached, SavedFit)
    if kept:
        optimizer = make_optimizer(model.parameters())
        kind = type(optimizer).__name__
        sizes = {"batch_size": batch_size, "accumulate": accumulate, "max_grad_norm": max_grad_norm}
        state = recorder.begin(shuffler, "fit_torch_ddp", None, optimizer=kind, **sizes)
        if state is not None:
            of_model, of_optimizer = read_state(state)
            model.load_state_dict(of_model)
            _warn_of_options(of_optimizer, optimizer)
    breakdown: dict[int, EpochBreakdown] = {}  # keyed by the shuffler's epoch number
    fit: Fit | None = None
    epoch: Epoch | None = None
    try:
        for number, epoch in recorder.epochs(shuffler, epochs):
            if fit is None:
                _check_processes(epoch)
                fit = Fit(
                    uuid.uuid4().hex,
                    epoch.number,
                    make_model,
                    make_optimizer,
                    step,
                    batch_size,
                    accumulate,
                    max_grad_norm,
                    dict(ddp_options),
                    "cpu" if device is None else device,
                    seed,
                    timeout,
                    state,
                )
            fetched = kept or validate is not None or early_stopping is not None or number == epochs - 1
            errors, counts, seconds, state = _train_epoch(epoch, fit, schedule(number), fetched, kept)
            fit = dataclasses.replace(fit, beginning=None)
            if fetched:
                load_state(state, model)
            recorder.speeds.add(
                [count / max(spent.own, 1e-9) for count, spent in zip(counts, seconds, strict=True)],
                seconds=max(spent.own for spent in seconds),
            )
            breakdown[epoch.number] = EpochBreakdown(epoch=number, ranks=seconds)
            if recorder.add(model, sum(errors) / sum(counts), saved=state):
                break
    finally:
        if epoch is not None and fit is not None:
            _end_all(epoch, fit, shuffler)
    return recorder.history(model, with_records(breakdown, shuffler.records))


def _step(
    training_step: OwnFunction | None,
    arrays: Sequence[str] | None,
    loss: Loss | None,
    metric: Callable[..., Any] | None,
    features: str,
    target: str,
) -> TrainingStep:
    if training_step is None:
        if arrays is not None:
            hint = "Use features= and target=, or a training_step."
            raise InvalidParameter.because("arrays", "only a training_step chooses arrays", hint)
        return SupervisedStep(loss or torch.nn.functional.cross_entropy, metric, features, target)
    if loss is not None:
        raise InvalidParameter.because("loss", "training_step computes the loss", "Leave one of them out.")
    return OwnStep(training_step, arrays, metric)


def _warn_of_options(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Say which options of an optimizer are those of a state, and not those that it was made with."""
    for before, made in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for name in sorted((before.keys() & made.keys()) - {"params", "lr"}):
            if repr(before[name]) != repr(made[name]):
                text = "dshuffle: the optimizer continues with %s=%s of the checkpoint, and not with %s"
                logger.warning(text, name, before[name], made[name])


def _train_epoch(
    epoch: Epoch, fit: Fit, factor: float, fetched: bool, with_optimizer: bool
) -> tuple[tuple[float, ...], tuple[int, ...], tuple[PhaseSeconds, ...], bytes]:
    """Train for an epoch, and fetch the state of module and optimizer; again, if rank 0 is lost in between."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            done = epoch.together(train, fit, factor)
            state: bytes = epoch.map(state_of, fit.name, with_optimizer)[0].result() if fetched else b""
        except MissingModel as error:
            if attempt == ATTEMPTS:
                raise
            logger.warning("dshuffle: the epoch starts again on all ranks: %s", error)
            epoch.accept()
        else:
            errors, counts, seconds = zip(*done, strict=True)
            return errors, counts, seconds, state
    raise AssertionError


def _check_processes(epoch: Epoch) -> None:
    processes = gathered(epoch.map(where))
    if len({(host, process) for host, process, _ in processes}) < len(processes):
        raise InvalidParameter.because(
            "shuffler",
            "its workers are threads of one process, which has only one default process group",
            "Use LocalCluster(processes=True).",
        )
    grouped = [rank for rank, (_, _, initialized) in enumerate(processes) if initialized]
    if grouped:
        raise ClusterError(
            f"ranks {grouped} already have a process group: another fit is running on these workers or was "
            "interrupted; wait for it to end, or restart the workers",
            transient=False,
        )


def _end_all(epoch: Epoch, fit: Fit, shuffler: Shuffler) -> None:
    try:
        for future in epoch.map(end, fit.name):
            future.exception()
    except (DShuffleError, OSError):  # the session is over, but its workers may train again
        with contextlib.suppress(DShuffleError, OSError):
            connected = set(cluster_info(shuffler.client)["workers"])
            left = [address for address in shuffler.addresses if address in connected]
            shuffler.client.run(end, None, fit.name, workers=left, on_error="ignore")
