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
    shuffler
        Shuffler with any sharding, assignment and delivery. Each worker must be a separate process.
    make_model
        Function that makes the module, called on every worker and in this process. It is sent to the workers, so a
        function of a script or a lambda works.
    make_optimizer
        Function from the parameters to the optimizer, such as
        ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``. With a checkpoint, also called in this process.
    epochs
        Number of passes over the whole dataset.
    batch_size
        Largest number of samples of one worker in one step. Every sample is trained on exactly once an epoch. All
        workers take the same number of mini-batches (the mode ``"uneven"`` of :meth:`dshuffle.Partition.to_torch`), so
        no rank is left waiting and ``Join`` is not needed. (In ``fit_parameter_server`` it is the number of samples of
        all workers together.)
    loss
        Function from the module's output and the targets to the mean loss over a mini-batch. An output that differs
        from the targets only in axes of length 1, such as ``(n, 1)`` and ``(n,)``, takes their shape. Other shapes
        that the loss would broadcast are refused. By default ``torch.nn.functional.cross_entropy``.
    metric
        Function like ``loss`` that measures the error after each epoch. By default, the error is the fraction of wrong
        labels if the loss compares class scores with integer labels, and otherwise the mean loss. Set it if the error
        should be another one, for instance if the loss compares embeddings by their labels. With ``training_step``, it
        is a function of the module and the mini-batch.
    training_step
        Function ``training_step(module, batch)`` that returns the mean loss of a mini-batch, in place of ``loss``,
        ``features`` and ``target``. ``batch`` has arrays of the dataset as tensors, by name. Several inputs, outputs of
        any kind, transforms and ``torch.autocast`` belong there.
    arrays
        Names of the arrays that ``training_step`` gets. By default all, which PyTorch must support then.
    accumulate
        Number of mini-batches whose gradients are added up for one step of the optimizer. ``batch_size`` is that of a
        mini-batch.
    max_grad_norm
        Largest norm of the averaged gradients, to which larger ones are scaled down. By default they are as they are.
    ddp_options
        Options of ``DistributedDataParallel``, such as ``find_unused_parameters``.
    device
        Device on which each worker trains, by default ``"cpu"``. On ``"cuda"``, gradients are averaged by NCCL. It
        needs a card of its own for each worker: let each see another one, by ``CUDA_VISIBLE_DEVICES``, as dask-cuda
        does.
    seed
        Seed of ``torch.manual_seed``, set before the model is made and, with the rank added, before every epoch.
    features, target
        Names of arrays in the dataset, ``(q, ...)``; floats must be finite. The module and the loss get them with the
        dtypes of the dataset. Cast features in the module's ``forward`` and targets in the loss, if they need others.
        Only integer labels become int64, if the loss does not accept them as they are.
    schedule
        Factor on the optimizer's initial learning rates by epoch.
    validate
        Function that is called in this process with the module (in evaluation mode) after every epoch. The metrics that
        it returns become the point's ``validation``. With it, the state of the module is sent to this process once an
        epoch, otherwise once at the end.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.
    timeout
        Seconds that a rank waits for the others in one step.
    plain_tcp
        Whether ranks may send gradients without encryption although the cluster uses TLS, as gloo cannot use TLS.

    Returns
    -------
    History
        ``model`` is the module, in evaluation mode. A point's ``error`` is that of the whole dataset after the epoch
        (see ``metric``). ``breakdown`` is the time spent in each phase. PyTorch averages gradients while it still
        computes others, so ``gradient_exchange`` counts only the averaging after the last gradient.
        ``forward_backward`` includes the optimizer's step.

    Raises
    ------
    ImportError
        PyTorch is not installed in this process or on a worker.
    InvalidParameter
        Two workers are threads of one process, a parameter is out of range, the loss would broadcast the target or does
        not accept it (the message names the shapes), features are not finite (the message names the sample), batch norm
        gets a mini-batch of one sample, or the parameters diverge.
    CheckpointError
        The checkpoint is one of another trainer, or of another kind of optimizer.
    WorkerLost
        A worker has left the cluster and was not replaced, or all workers have.

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

    Examples
    --------
    >>> def make_model():
    ...     return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10))
    >>> def make_optimizer(parameters):
    ...     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    >>> history = fit_torch_ddp(shuffler, make_model, make_optimizer, epochs=5, batch_size=32)  # doctest: +SKIP
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
