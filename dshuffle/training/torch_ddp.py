"""Synchronous SGD with PyTorch: DistributedDataParallel inside Dask workers (extra ``torch``).

A worker is a rank, which calls :func:`train` once an epoch. Every call may be the first one of its process: if a worker
was lost, :meth:`dshuffle.Epoch.together` calls it again on all ranks, and at least one of them is new. So it begins by
asking whether all ranks are in one process group. If not, they leave theirs, join a new one, and load the state at the
beginning of the epoch from a rank that has it.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import io
import os
import secrets
import socket
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Unpack
from urllib.parse import urlsplit

import numpy as np
import psutil
from distributed import get_worker

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost, reasons_of
from dshuffle.integrations import INSTALL_TORCH
from dshuffle.planning.batching import UNEVEN
from dshuffle.redaction import short_repr
from dshuffle.runtime import Epoch, Group, Partition, Shuffler
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.training.fit import (
    EVALUATION_ROWS,
    FitOptions,
    History,
    SavedFit,
    Trained,
    batching_of,
    check_converging,
    check_finite,
    check_fixed_workers,
    check_name,
    run_epochs,
    trainer,
)

try:
    import torch
    import torch.distributed as dist

    # When it is first imported, its functions take the process group of that moment as a default, and keep it. PyTorch
    # imports it with the first DistributedDataParallel: the connections of that group could never be closed.
    import torch.distributed.nn.functional
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from dshuffle.integrations.torch import PartitionBatches, tensor_of, to_device
except ImportError as exc:
    raise ImportError(f"dshuffle.training.torch_ddp needs PyTorch ({exc}). {INSTALL_TORCH}") from exc

Function = Callable[..., Any]
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OWN_OPTIONS = {"module", "device_ids", "output_device", "process_group", "broadcast_buffers", "forward_sync_buffers"}
"""Options of DistributedDataParallel that the fit sets itself."""

_SYNC_BUFFERS = next(  # PyTorch 2.14 renames it
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@trainer("gradients")
def fit_torch_ddp(
    shuffler: Shuffler,
    make_model: Function,
    make_optimizer: Function,
    *,
    epochs: int,
    batch_size: int,
    loss: Function | None = None,
    metric: Function | None = None,
    training_step: Function | None = None,
    arrays: Sequence[str] | None = None,
    accumulate: int = 1,
    ddp_options: Mapping[str, Any] = NO_OPTIONS,
    device: Any = "cpu",
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    timeout: float = 1800.0,
    plain_tcp: bool = False,
    **options: Unpack[FitOptions],
) -> History[torch.nn.Module]:
    """Train a PyTorch module with DistributedDataParallel, with one rank in every Dask worker process.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery, whose workers are processes.
    make_model, make_optimizer
        Function that returns a module, and one of its parameters that returns an optimizer. They are called on each
        worker.
    epochs, seed
        Number of passes over the whole dataset, and seed of PyTorch's random numbers.
    batch_size
        Largest number of samples of one rank in a mini-batch, as in
        :func:`~dshuffle.training.fit_synchronous_sgd`.
    loss
        Function from the module's output and the targets to the mean loss over a mini-batch. An output that differs
        from the targets only in axes of length 1, such as ``(n, 1)`` and ``(n,)``, takes their shape. Other shapes that
        a loss of PyTorch would broadcast are refused. By default ``torch.nn.functional.cross_entropy``.
    metric
        Mean of another measure over a mini-batch, with the arguments of ``loss`` or ``training_step``: the error.
    training_step, arrays
        In place of ``loss``, ``features`` and ``target``, a function from the module and a mini-batch, which has all
        arrays of the dataset by name, or these, to the mean loss.
    accumulate
        Number of mini-batches whose gradients are added up before a step.
    ddp_options
        Further options of DistributedDataParallel.
    device
        Device of each worker, such as ``"cuda"``.
    features, target
        Names of arrays in the dataset, ``(q, ...)``; floats must be finite. The module and the loss get them with the
        dtypes of the dataset. Cast features in the module's ``forward`` and targets in the loss, if they need others.
        Only labels become int64, if the output has a score for each class.
    timeout
        Seconds after which a rank that waits for another fails.
    plain_tcp
        Whether gradients may be sent without encryption on a cluster that uses TLS.
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`.

    Returns
    -------
    History
        ``model`` is the module. A point's ``error`` is the mean over all samples after the epoch of ``metric``, or of
        wrong labels if the module has scores of classes, or else of the loss.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays or the workers do not suit the fit, or the parameters diverge.
    WorkerLost
        A worker has left the cluster, and no other one takes its rank.

    Notes
    -----
    If mini-batches differ in size, their gradients are weighted by the number of samples. Batch norm is local to each
    rank. Running statistics are averaged over ranks at the end of each epoch (DistributedDataParallel would use those
    of rank 0). Module and optimizer stay on the workers between epochs.

    If a worker is lost and replaced, the epoch starts again on all ranks, from the module and the optimizer at its
    beginning, of which every worker keeps copies. The result is the same except for rounding. Ranks notice a stopped
    worker, whose connections stay open, only after ``timeout``.

    With a checkpoint (``Shuffler(checkpoint=...)``), module and optimizer are sent to this process and kept in the
    checkpoint after every epoch. A session that continues from it continues the fit, with the same kind of optimizer.
    The options of the optimizer stay as they were: all but the learning rate, as in ``Optimizer.load_state_dict``.

    gloo listens on a free port of each worker's host, on the interface with the worker's address, unless
    ``GLOO_SOCKET_IFNAME`` names another interface.

    References
    ----------
    Nguyen et al. (2022), Figures 3 to 5; see docs/papers.md. S. Li et al., "PyTorch distributed", VLDB 2020.
    """
    for name, number, least in (("batch_size", batch_size, 1), ("accumulate", accumulate, 1), ("seed", seed, None)):
        as_integer(name, number, least)
    if own_options := OWN_OPTIONS & set(ddp_options):
        name = f"ddp_options[{min(own_options)!r}]"
        raise InvalidParameter.because(name, "fit_torch_ddp sets it itself", "Leave it out of ddp_options.")
    if accumulate > 1 and ddp_options.get("static_graph"):
        reason = "a static graph cannot leave out the averaging of gradients"
        raise InvalidParameter.because("accumulate", reason, "Leave out static_graph.")
    if not 0 < timeout < float("inf"):
        raise InvalidParameter.of("timeout", timeout, "a finite number of seconds > 0")
    names, checked = list(shuffler.dataset.arrays), {}
    costs: Any = training_step
    error: Any = metric or training_step
    if training_step is None:
        if arrays is not None:
            hint = "Use features= and target=, or a training_step."
            raise InvalidParameter.because("arrays", "only a training_step chooses arrays", hint)
        checked = {"features": features, "target": target}
        for parameter, name in checked.items():
            check_name(parameter, name, names)
        compared = Comparison(loss or torch.nn.functional.cross_entropy, metric, features, target)
        arrays, costs, error = list(dict.fromkeys(checked.values())), compared.loss, compared.error
    elif loss is not None:
        raise InvalidParameter.because("loss", "training_step computes the loss", "Leave one of them out.")
    for name in arrays or ():
        check_name("arrays", name, names)
    check_fixed_workers(shuffler, "fit_torch_ddp")
    if shuffler.addresses[0].startswith("tls://") and not plain_tcp:
        raise InvalidParameter.because(
            "plain_tcp=False",
            "this cluster uses TLS, but PyTorch's gloo sends gradients without encryption",
            "Use plain_tcp=True in a network that you trust, or fit_parameter_server.",
        )
    if shuffler.n_workers > 1 and shuffler.addresses[0].startswith("inproc://"):
        reason = "its workers are threads of one process, which has only one default process group"
        raise InvalidParameter.because("shuffler", reason, "Use LocalCluster(processes=True).")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model().eval()
    kept = shuffler.checkpoint is not None or isinstance(shuffler.attached, SavedFit)
    fit = Fit(
        uuid.uuid4().hex, make_model, make_optimizer, costs, error, list(arrays or names), checked, batch_size,
        accumulate, dict(ddp_options), device, seed, timeout,
    )  # fmt: skip
    beginning: bytes | None = b""

    def restored(state: bytes) -> torch.nn.Module:
        nonlocal beginning
        beginning = state
        model.load_state_dict(read_state(state)[0])
        return model

    def train_epoch(epoch: Epoch, number: int, model: torch.nn.Module, factor: float) -> Trained:
        nonlocal beginning
        watched = options.get("validate") or options.get("early_stopping")
        fetched = bool(kept or watched or number == epochs - 1)
        done = epoch.together(train, fit, beginning, factor, fetched, kept)
        states, errors, counts = zip(*done, strict=True)
        beginning = None
        if fetched:
            model.load_state_dict(read_state(states[0])[0])
        return Trained(model, sum(errors) / sum(counts), states[0])

    try:
        return run_epochs(
            shuffler, "fit_torch_ddp", model, train_epoch, epochs, restored=restored, kept=kept, **options
        )
    finally:
        with contextlib.suppress(DShuffleError, OSError):
            connected = set(cluster_info(shuffler.client)["workers"])
            left = [address for address in shuffler.addresses if address in connected]
            shuffler.client.run(end, fit.name, workers=left, on_error="ignore")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A loss, and the error, of the module's output for one array and the targets in another.

    Both get the output in the shape of the targets, if they differ in axes of length 1 only; otherwise as it is.
    """

    function: Function
    metric: Function | None
    features: str
    target: str
    accepted: set[Any] = field(default_factory=set)
    """Shapes that a function has compared without a warning."""

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The mean loss over a mini-batch, with its gradient."""
        return self._compared(self.function, model, batch)

    def error(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The mean over a mini-batch of the metric, or else of wrong labels or the loss."""
        return self._compared(self._measure, model, batch)

    def _measure(self, output: Any, targets: Any) -> Any:
        if self.metric is None and _are_scores(output, targets):
            return (output.argmax(dim=1) != targets).double().mean()
        return (self.metric or self.function)(output, targets)

    def _compared(self, function: Function, model: Any, batch: Mapping[str, Any]) -> Any:
        output: Any = None
        targets, key = batch[self.target], None
        try:
            output = formed = model(batch[self.features])
            if not isinstance(output, torch.Tensor) or output.shape == targets.shape:
                return function(output, targets)
            key = function is self.function, output.shape[1:], targets.shape[1:]
            if len(output) == len(targets) and output.squeeze().shape == targets.squeeze().shape:
                formed = output.reshape(targets.shape)
            elif _are_scores(output, targets):
                targets = targets.long()
            if key in self.accepted:
                return function(formed, targets)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="Using a target size")  # which would broadcast
                compared = function(formed, targets)
            self.accepted.add(key)
            return compared
        except Exception as error:  # the loss is the user's function, so this may be any error
            if key is not None and key not in self.accepted:
                shapes = f"the output has the shape {tuple(output.shape)}, the target the shape {tuple(targets.shape)}"
                raise InvalidParameter.of(
                    "target",
                    self.target,
                    f"an array of integer labels for class scores, or one of the output's shape ({shapes} and the "
                    f"dtype {targets.dtype})",
                    "The loss does not accept these, or would broadcast them. Change what the module returns, or "
                    "reshape and cast the target in the loss.",
                ) from error
            dtypes = ", ".join(f"{name!r} has {batch[name].dtype}" for name in (self.features, self.target))
            error.add_note(
                f"In the dataset, {dtypes}. If the module has parameters of another dtype, cast the features in its "
                "forward and the target in the loss."
            )
            raise


def _are_scores(output: Any, targets: Any) -> bool:
    """Whether the targets are labels, and the output has a score for each class on its second axis."""
    fractional = targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool
    if fractional or not isinstance(output, torch.Tensor) or output.ndim < 2:
        return False
    return output.shape[:1] + output.shape[2:] == targets.shape  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Fit:
    """What all ranks of a fit need to know."""

    name: str
    make_model: Function
    make_optimizer: Function
    loss: Function
    error: Function
    arrays: list[str]
    checked: Mapping[str, str]
    batch_size: int
    accumulate: int
    ddp_options: Mapping[str, Any]
    device: Any
    seed: int
    timeout: float


@dataclass(slots=True)
class Process:
    """What a worker process has of a fit, from epoch to epoch."""

    store: Any = None
    model: Any = None
    optimizer: Any = None
    first_steps: tuple[float, ...] = ()
    number: int = 0
    """A random number that all ranks of its process group share; 0 without one."""
    grouped: bool = False
    """Whether the process group of this process may be the fit's, even if it failed to join it."""
    ended: bool = False
    computed: float = 0.0
    """Time at which the last gradients of the current step were ready."""
    beginnings: dict[int, Any] = field(default_factory=dict)
    """State of model and optimizer at the beginning of an epoch, by its number: of this epoch and the next one."""

    def leave(self) -> None:
        """Leave the process group."""
        # The module holds the process group: connections would stay open.
        self.model = self.optimizer = None
        grouped, self.grouped, self.number = self.grouped, False, 0
        if grouped and dist.is_initialized():
            dist.destroy_process_group()

    def state(self) -> Any:
        """Copy the state of model and optimizer."""
        kind = type(self.optimizer).__name__
        return copy.deepcopy((self.model.module.state_dict(), self.optimizer.state_dict(), kind))

    def load(self, state: tuple[Any, ...]) -> None:
        """Load a state of model and optimizer."""
        if (kind := type(self.optimizer).__name__) != state[2]:
            raise InvalidParameter.of("make_optimizer", kind, f"a function that returns {state[2]}, as before")
        self.model.module.load_state_dict(state[0])
        # An optimizer takes tensors as they are, and would train on those that another restart needs.
        self.optimizer.load_state_dict(copy.deepcopy(state[1]))


_processes: dict[str, Process] = {}
"""By name of the fit. One at a time has a model, as a process has one default process group."""


def train(
    partition: Partition, group: Group, fit: Fit, beginning: bytes | None, factor: float, fetched: bool, kept: bool
) -> tuple[bytes, float, int]:
    """Train for one epoch, in step with all other ranks.

    ``beginning`` is the state before the first epoch, empty for a new fit, and None in later epochs. Returns the state
    of the module, if it is fetched, and of the optimizer, if it is kept, of rank 0; the sum of errors; and the number
    of samples.
    """
    partition.mark_trained(0)
    to_device(fit.device)  # refuses a device that is not there, before the ranks wait for each other
    process, epoch = _processes.setdefault(fit.name, Process()), partition.epoch
    # Before this succeeds, the model is not this call's: Dask may compute the lost result of an earlier call again.
    numbers = _of_all(group, process.number)
    with _leaving_on_errors(process):
        if 0 in numbers or len(set(numbers)) > 1:
            _join(process, partition, group, fit, beginning)
        process.beginnings = {number: state for number, state in process.beginnings.items() if number >= epoch}
        process.beginnings.setdefault(epoch, process.state())
        for options, first in zip(process.optimizer.param_groups, process.first_steps, strict=True):
            options["lr"] = first * factor
        torch.manual_seed(fit.seed + 1_000_003 * epoch + group.rank + 1)
        _steps(partition, group, process, fit)
        total = sum(_of_all(group, len(partition)))
        model = process.model.module
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer *= len(partition) / total
                dist.all_reduce(buffer)
        if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
            check_converging("make_optimizer", epoch, np.inf)
        process.beginnings[epoch + 1] = process.state()
        partition.mark_trained()
        saved = io.BytesIO()
        if fetched and group.rank == 0:
            torch.save(process.beginnings[epoch + 1][: 3 if kept else 1], saved)
        model.eval()
        error = 0.0
        with torch.no_grad():
            for columns in partition.batches(EVALUATION_ROWS):
                batch = {name: tensor_of(columns[name]).to(fit.device) for name in fit.arrays}
                error += float(fit.error(model, batch)) * len(columns[fit.arrays[0]])
        return saved.getvalue(), error, len(partition)


def read_state(state: bytes) -> tuple[Any, ...]:
    """The states of module and optimizer that :func:`train` returned."""
    # From our own workers, or from a checkpoint, which is unpickled anyway. Optimizers may keep any object.
    return torch.load(io.BytesIO(state), weights_only=False, map_location="cpu")  # type: ignore[no-any-return]


def end(name: str) -> None:
    """Drop all that the process has of a fit. Idempotent."""
    if (process := _processes.pop(name, None)) is not None:
        process.ended = True
        process.beginnings.clear()
        process.leave()


@contextlib.contextmanager
def _leaving_on_errors(process: Process) -> Iterator[None]:
    """Close the connections of a rank that fails, so that the other ranks do not wait for it."""
    try:
        yield
    except BaseException as error:
        # The frames of an error in the module hold the module, and it the process group: connections would stay open.
        for reason in reasons_of(error):
            traceback.clear_frames(reason.__traceback__)
        process.leave()
        of_peers = any(word in str(error) for word in ("gloo", "NCCL", "peer", "ProcessGroup"))
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and of_peers):
            raise PeerFailed(f"another rank failed or cannot be reached: {error}") from error
        raise


def _of_all(group: Group, number: int) -> list[int]:
    """The integers below 2^31 of all ranks."""
    own = np.where(np.arange(group.size) == group.rank, float(number), 0.0)
    return [round(mean * group.size) for mean in group.mean(own).tolist()]


def interface_of(host: str) -> str | None:
    """Return the interface with the host's address. By default gloo uses that of the host name, if it resolves."""
    address = socket.getaddrinfo(host, None)[0][4][0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(entry.address == address for entry in addresses)), None)


def _join(process: Process, partition: Partition, group: Group, fit: Fit, beginning: bytes | None) -> None:
    """Join a new process group with all ranks, and get the state at the beginning of this epoch."""
    process.leave()
    if dist.is_initialized():
        raise ClusterError(
            f"rank {group.rank} already has a process group: another fit is running on these workers or was "
            "interrupted; wait for it to end, or restart the workers",
            transient=False,
        )
    limit, host = datetime.timedelta(seconds=fit.timeout), str(urlsplit(group.address).hostname)
    store: Any = None
    if group.rank == 0:
        store = dist.TCPStore(host, 0, group.size, is_master=True, timeout=limit, wait_for_workers=False)
    port = _of_all(group, store.port if store else 0)[0]
    store = store or dist.TCPStore(host, port, group.size, is_master=False, timeout=limit)
    if interface := interface_of(str(urlsplit(get_worker().address).hostname)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # It also fails at once if a rank has gone, where the next lines would wait for it.
    number = _of_all(group, 1 + secrets.randbelow(2**31 - 1))[0]
    if process.ended:
        raise PeerFailed("the fit has ended")
    process.grouped, process.store = True, store
    # What the ranks tell each other beside gradients is on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.device(fit.device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    torch.manual_seed(fit.seed)
    # Running statistics are averaged once an epoch instead of being copied from rank 0 in every step.
    model = DistributedDataParallel(fit.make_model().to(fit.device), **{**fit.ddp_options, _SYNC_BUFFERS: False})
    # register_comm_hook rejects string annotations, which this module has; a lambda does not have annotations.
    model.register_comm_hook(process, lambda process, bucket: _average(process, bucket))
    process.model, process.optimizer, process.number = model, fit.make_optimizer(model.parameters()), number
    process.first_steps = tuple(options["lr"] for options in process.optimizer.param_groups)
    having = _of_all(group, partition.epoch in process.beginnings)
    if any(having):
        states: list[Any] = [process.beginnings.get(partition.epoch)]
        dist.broadcast_object_list(states, src=having.index(1), device=torch.device("cpu"))
        process.load(states[0])
    elif beginning is None:
        raise WorkerLost("no worker with the model is left. Start the fit again, or continue it from a checkpoint")
    elif beginning:
        process.load(read_state(beginning))


def _average(process: Process, bucket: Any) -> Any:
    """Average a bucket of gradients over all ranks, and note when the bucket was ready."""
    process.computed = time.perf_counter()
    return allreduce_hook(dist.group.WORLD, bucket)


def _steps(partition: Partition, group: Group, process: Process, fit: Fit) -> None:
    """Take the steps of one epoch."""
    model, optimizer, device = process.model, process.optimizer, torch.device(fit.device)
    # The only kind that refuses a single sample as a rule: images have more values in a channel.
    least = 2 if any(isinstance(module, torch.nn.BatchNorm1d) for module in model.modules()) else 1
    batching = batching_of(partition, fit.batch_size, least)
    positions = [batching.positions(number) for number in range(len(batching))]
    batches = PartitionBatches(partition, fit.batch_size, mode=UNEVEN, arrays=fit.arrays, least=least, device=device)
    totals = torch.tensor([float(len(chosen)) for chosen in positions])
    dist.all_reduce(totals)
    # Samples of all ranks in the step of the optimizer that a mini-batch belongs to.
    of_steps = [float(part.sum()) for part in totals.split(fit.accumulate) for _ in part]
    model.train()
    tensors: Any
    for number, (chosen, total, tensors) in enumerate(zip(positions, of_steps, batches, strict=True), 1):
        ends = number % fit.accumulate == 0 or number == len(positions)
        with contextlib.nullcontext() if ends else model.no_sync():
            batch = dict(zip(fit.arrays, tensors, strict=True))
            for parameter, name in fit.checked.items():
                if not torch.isfinite(batch[name]).all():
                    check_finite(parameter, name, batch[name].cpu().numpy(), partition.sample_ids[chosen])
            loss = fit.loss(model, batch)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                hint = "It must return the mean loss of the mini-batch, a tensor with one number and its gradient."
                name = "loss" if fit.checked else "training_step"
                raise InvalidParameter.because(name, f"it returned {short_repr(loss)}", hint)
            # The weight makes the mean over ranks the mean over samples.
            (loss.reshape(()) * (len(chosen) * group.size / total)).backward()
        if ends:
            partition.note_waiting(time.perf_counter() - process.computed)
            optimizer.step()
            optimizer.zero_grad()
