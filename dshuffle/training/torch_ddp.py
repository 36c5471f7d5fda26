"""Synchronous SGD with PyTorch: DistributedDataParallel inside Dask workers (extra ``torch``)."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dshuffle.checks import as_integer
from dshuffle.errors import DShuffleError, InvalidParameter
from dshuffle.runtime import Epoch, Shuffler
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.training.fit import (
    CONSTANT,
    EarlyStopping,
    History,
    OnEpoch,
    SavedFit,
    Schedule,
    Trained,
    Validate,
    Watch,
    run_epochs,
)
from dshuffle.training.inputs import check_fixed_workers
from dshuffle.training.torch_rank import Fit, MakeModel, MakeOptimizer, end, read_state, torch, train
from dshuffle.training.torch_step import Loss, OwnFunction, OwnStep, SupervisedStep, TrainingStep

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OWN_OPTIONS = {"module", "device_ids", "output_device", "process_group", "broadcast_buffers", "forward_sync_buffers"}
"""Options of DistributedDataParallel that the fit sets itself."""


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
        that a loss of PyTorch would broadcast are refused. By default ``torch.nn.functional.cross_entropy``.
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
    refused. Warnings say which sizes of batches differ. The options of the optimizer stay as they were: all but the
    learning rate, as in ``Optimizer.load_state_dict``.

    gloo listens on a free port of each worker's host, on the interface with the worker's address, unless
    ``GLOO_SOCKET_IFNAME`` names another interface.

    References
    ----------
    Nguyen et al. (2022), Figures 3 to 5; see docs/papers.md. S. Li et al., "PyTorch distributed", VLDB 2020.
    """
    for name, number, least in (("batch_size", batch_size, 1), ("accumulate", accumulate, 1), ("seed", seed, None)):
        as_integer(name, number, least)
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
    if shuffler.addresses[0].startswith("tls://") and not plain_tcp:
        raise InvalidParameter.because(
            "plain_tcp=False",
            "this cluster uses TLS, but PyTorch's gloo sends gradients without encryption",
            "Use plain_tcp=True in a network that you trust, or fit_parameter_server.",
        )
    if shuffler.n_workers > 1 and shuffler.addresses[0].startswith("inproc://"):
        raise InvalidParameter.because(
            "shuffler",
            "its workers are threads of one process, which has only one default process group",
            "Use LocalCluster(processes=True).",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model().eval()
    kept = shuffler.checkpoint is not None or isinstance(shuffler.attached, SavedFit)
    settings: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate, "max_grad_norm": max_grad_norm}
    if kept:
        settings["optimizer"] = type(make_optimizer(model.parameters())).__name__
    beginning: bytes | None = None
    fit: Fit | None = None

    def restored(state: bytes) -> torch.nn.Module:
        nonlocal beginning
        beginning = state
        model.load_state_dict(read_state(state)[0])
        return model

    def train_epoch(epoch: Epoch, number: int, model: torch.nn.Module, factor: float) -> Trained:
        nonlocal fit
        fit = Fit(
            uuid.uuid4().hex, epoch.number, make_model, make_optimizer, step, batch_size, accumulate, max_grad_norm,
            dict(ddp_options), "cpu" if device is None else device, seed, timeout, beginning,
        ) if fit is None else dataclasses.replace(fit, beginning=None)  # fmt: skip
        fetched = kept or validate is not None or early_stopping is not None or number == epochs - 1
        states, errors, *work = zip(*epoch.together(train, fit, factor, (fetched, kept)), strict=True)
        if fetched:
            model.load_state_dict(read_state(states[0])[0])
        return Trained(model, sum(errors) / sum(work[0]), list(zip(*work, strict=True)), states[0])

    watch = Watch(schedule, validate, early_stopping, on_epoch)
    try:
        return run_epochs(
            shuffler, "fit_torch_ddp", model, train_epoch, epochs, watch, settings, restored=restored, kept=kept
        )
    finally:
        if fit is not None:
            with contextlib.suppress(DShuffleError, OSError):
                connected = set(cluster_info(shuffler.client)["workers"])
                left = [address for address in shuffler.addresses if address in connected]
                shuffler.client.run(end, fit.name, workers=left, on_error="ignore")


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
