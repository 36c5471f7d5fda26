"""One rank of :func:`~dshuffle.training.torch_ddp.fit_torch_ddp`, in a Dask worker.

Every call of :func:`train` may be the first one of its process: if a worker was lost, :meth:`dshuffle.Epoch.together`
calls it again on all ranks, and at least one of them is new. So it begins by asking whether all ranks are in one
process group. If not, they leave theirs, join a new one, and load the state at the beginning of the epoch from a rank
that has it.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed, WorkerLost, reasons_of
from dshuffle.integrations import INSTALL_TORCH
from dshuffle.planning.batching import UNEVEN
from dshuffle.runtime import Group, Partition
from dshuffle.training.fit import PhaseSeconds
from dshuffle.training.inputs import EVALUATION_ROWS
from dshuffle.training.network_interface import interface_of

try:
    import torch as torch
    import torch.distributed as dist

    # When it is first imported, its functions take the process group of that moment as a default, and keep it. PyTorch
    # imports it with the first DistributedDataParallel: the connections of that group could never be closed.
    import torch.distributed.nn.functional
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from dshuffle.integrations.torch import PartitionBatches, tensor_of, to_device
    from dshuffle.training.torch_step import TrainingStep
except ImportError as exc:
    raise ImportError(f"dshuffle.training.torch_ddp needs PyTorch ({exc}). {INSTALL_TORCH}") from exc

MakeModel = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Fit:
    """What all ranks of a fit need to know.

    Parameters
    ----------
    first_epoch
        Number of its first epoch.
    beginning
        State of model and optimizer to begin with, if the fit continues an earlier one.

    Notes
    -----
    The other parameters are those of :func:`~dshuffle.training.torch_ddp.fit_torch_ddp`.
    """

    name: str
    first_epoch: int
    make_model: MakeModel
    make_optimizer: MakeOptimizer
    step: TrainingStep
    batch_size: int
    accumulate: int
    max_grad_norm: float | None
    ddp_options: Mapping[str, Any]
    device: Any
    seed: int
    timeout: float
    beginning: bytes | None


@dataclass(slots=True)
class TrainingState:
    """State that a rank keeps in its process from epoch to epoch."""

    store: Any
    model: Any
    optimizer: Any
    step: TrainingStep
    first_steps: list[float]
    computed: float = 0.0
    """Time at which the last gradients of the current step were ready."""


class MissingModel(WorkerLost):
    """The worker of rank 0 is a new one, and has not trained yet."""


@dataclass(slots=True)
class Process:
    """What a worker process has of a fit."""

    seat: TrainingState | None = None
    number: int = 0
    """A random number that all ranks of its process group share; 0 without one."""
    grouped: bool = False
    """Whether the process group of this process may be the fit's, even if it failed to join it."""
    ended: bool = False
    beginnings: dict[int, Any] = field(default_factory=dict)
    """State of model and optimizer at the beginning of an epoch, by its number: of this epoch and the next one."""


_processes: dict[str, Process] = {}
"""By name of the fit. One at a time has a seat, as a process has one default process group."""


def where(partition: Partition) -> tuple[str, int, bool]:
    """Return a worker's host and process id, and whether a process group exists. Runs on each worker."""
    return socket.gethostname(), os.getpid(), dist.is_initialized()


def train(partition: Partition, group: Group, fit: Fit, factor: float) -> tuple[float, int, PhaseSeconds]:
    """Train for one epoch, in step with all other ranks. Runs as a task on each worker."""
    partition.mark_trained(0)
    fit.step.arrays(partition.names)  # refuses missing arrays, before the ranks wait for each other
    to_device(fit.device)  # and a device that is not there
    process = _processes.setdefault(fit.name, Process())
    # Before this succeeds, a seat is not this call's: Dask may compute the lost result of an earlier call again.
    numbers = _sums(group, np.where(np.arange(group.size) == group.rank, process.number, 0))
    with GroupExit(process):
        if min(numbers) == 0 or len(set(numbers)) > 1:
            _join(process, partition, group, fit)
        seat = process.seat
        assert seat is not None
        process.beginnings = {
            number: state for number, state in process.beginnings.items() if number >= partition.epoch
        }
        if partition.epoch not in process.beginnings:
            process.beginnings[partition.epoch] = _state(seat)
        for options, first in zip(seat.optimizer.param_groups, seat.first_steps, strict=True):
            options["lr"] = first * factor if isinstance(first, torch.Tensor) else float(first * factor)
        torch.manual_seed(fit.seed + 1_000_003 * partition.epoch + group.rank + 1)
        seconds = _steps(partition, group, seat, fit)
        partition.note_waiting(seconds.gradient_exchange)
        [total] = _sums(group, np.array([len(partition)]))
        for buffer in seat.model.module.buffers():
            if buffer.is_floating_point():
                buffer *= len(partition) / total
                dist.all_reduce(buffer)
        if not all(torch.isfinite(parameter).all() for parameter in seat.model.parameters()):
            raise InvalidParameter.because(
                "make_optimizer",
                f"the parameters diverged in epoch {partition.epoch}",
                "Take a smaller step, or scale the features.",
            )
        process.beginnings[partition.epoch + 1] = _state(seat)
        partition.mark_trained()
        return _error(partition, seat, fit.device), len(partition), seconds


def state_of(partition: Partition, name: str, with_optimizer: bool) -> bytes:
    """Return the state of module and optimizer from rank 0, and empty bytes from other ranks. Runs on each worker."""
    saved = io.BytesIO()
    if partition.rank == 0:
        seat = _processes.get(name, Process()).seat
        if seat is None:
            raise MissingModel("the worker of rank 0 was replaced, and the new one has no model yet")
        torch.save((seat.model.module.state_dict(), seat.optimizer.state_dict() if with_optimizer else None), saved)
    return saved.getvalue()


def read_state(state: bytes) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The states of module and optimizer that :func:`state_of` returned."""
    # From our own workers, or from a checkpoint, which is unpickled anyway. Optimizers may keep any object.
    of_model, of_optimizer = torch.load(io.BytesIO(state), weights_only=False, map_location="cpu")
    return of_model, of_optimizer


def load_state(state: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what :func:`state_of` returned."""
    of_model, of_optimizer = read_state(state)
    model.load_state_dict(of_model)
    if optimizer is not None:
        optimizer.load_state_dict(of_optimizer)


def end(partition: Partition | None, name: str) -> None:
    """Drop all that the process has of a fit. Runs as a task on each worker. Idempotent."""
    if (process := _processes.pop(name, None)) is not None:
        process.ended = True
        process.beginnings.clear()
        _leave(process)


class GroupExit:
    """Close the connections of a rank that fails, so that the other ranks do not wait for it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        # The frames of an error in the module hold the module, and it the process group: connections would stay open.
        for reason in reasons_of(error):
            traceback.clear_frames(reason.__traceback__)
        _leave(self.process)
        of_peers = any(word in str(error) for word in ("gloo", "NCCL", "peer", "ProcessGroup"))
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and of_peers):
            raise PeerFailed(f"another rank failed or cannot be reached: {error}") from error


def _leave(process: Process) -> None:
    if process.seat is not None:
        # The module holds the process group, and frames that still run hold the seat: connections would stay open.
        process.seat.model = process.seat.optimizer = None
    grouped, process.grouped, process.seat, process.number = process.grouped, False, None, 0
    if grouped and dist.is_initialized():
        dist.destroy_process_group()


def _sums(group: Group, numbers: NDArray[np.integer[Any]]) -> list[int]:
    """The sums of integers below 2^31 over all ranks."""
    return [round(mean * group.size) for mean in group.mean(numbers.astype(np.float64)).tolist()]


def _join(process: Process, partition: Partition, group: Group, fit: Fit) -> None:
    """Join a new process group with all ranks, and get the state at the beginning of this epoch."""
    _leave(process)
    if dist.is_initialized():
        raise ClusterError(
            f"rank {group.rank} already has a process group: another fit is running on these workers or was "
            "interrupted; wait for it to end, or restart the workers",
            transient=False,
        )
    limit = datetime.timedelta(seconds=fit.timeout)
    host = str(urlsplit(group.address).hostname)
    store: Any = None
    numbers = np.zeros(2, np.int64)  # by rank 0: the port of its store, and the number of the group
    if group.rank == 0:
        store = dist.TCPStore(host, 0, group.size, is_master=True, timeout=limit, wait_for_workers=False)
        numbers[:] = store.port, 1 + secrets.randbelow(2**31 - 1)
    port, number = _sums(group, numbers)
    if store is None:
        store = dist.TCPStore(host, port, group.size, is_master=False, timeout=limit)
    if interface := interface_of(str(urlsplit(get_worker().address).hostname)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    _sums(group, numbers)  # fails at once if a rank has gone, where the next line would wait for it
    if process.ended:
        raise PeerFailed("the fit has ended")
    process.grouped = True
    # What the ranks tell each other beside gradients is on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.device(fit.device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    torch.manual_seed(fit.seed)
    # Running statistics are averaged once an epoch instead of being copied from rank 0 in every step.
    options = {**fit.ddp_options, _SYNC_BUFFERS: False}
    model = DistributedDataParallel(fit.make_model().to(fit.device), **options)
    optimizer = fit.make_optimizer(model.parameters())
    seat = TrainingState(store, model, optimizer, fit.step, [options["lr"] for options in optimizer.param_groups])
    # register_comm_hook rejects string annotations, which this module has; a lambda does not have annotations.
    model.register_comm_hook(seat, lambda seat, bucket: average(seat, bucket))
    process.seat, process.number = seat, number
    if partition.epoch > fit.first_epoch:
        _load(process, seat, partition.epoch, group)
    elif fit.beginning is not None:
        load_state(fit.beginning, model.module, optimizer)


_SYNC_BUFFERS = next(  # PyTorch 2.14 renames it
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def _load(process: Process, seat: TrainingState, epoch: int, group: Group) -> None:
    """Load the state at the beginning of an epoch, from the first rank that has it."""
    having = torch.zeros(group.size)
    having[group.rank] = float(epoch in process.beginnings)
    dist.all_reduce(having)
    if not having.any():
        raise WorkerLost("no worker with the model is left. Start the fit again, or continue it from a checkpoint")
    states: list[Any] = [process.beginnings.get(epoch)]
    dist.broadcast_object_list(states, src=int(having.argmax()), device=torch.device("cpu"))
    [(model, optimizer)] = states
    seat.model.module.load_state_dict(model)
    # An optimizer takes tensors as they are, and would train on those that another restart needs.
    seat.optimizer.load_state_dict(copy.deepcopy(optimizer))


def _state(seat: TrainingState) -> Any:
    return copy.deepcopy((seat.model.module.state_dict(), seat.optimizer.state_dict()))


def average(seat: TrainingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, and note when the bucket was ready."""
    seat.computed = time.perf_counter()
    future: torch.futures.Future[torch.Tensor] = allreduce_hook(dist.group.WORLD, bucket)
    return future


def _steps(partition: Partition, group: Group, seat: TrainingState, fit: Fit) -> PhaseSeconds:
    names = seat.step.arrays(partition.names)
    # The only kind that refuses a single sample as a rule: images have more values in a channel.
    least = 2 if any(isinstance(module, torch.nn.BatchNorm1d) for module in seat.model.modules()) else 1
    device = torch.device(fit.device)
    batches = PartitionBatches(partition, fit.batch_size, mode=UNEVEN, arrays=names, least=least, device=device)
    positions = [batches.batching.positions(number) for number in range(len(batches))]
    totals = torch.tensor([float(len(batch)) for batch in positions])
    dist.all_reduce(totals)
    # Samples of all ranks in the step of the optimizer that a mini-batch belongs to.
    of_steps = [float(part.sum()) for part in totals.split(fit.accumulate) for _ in part]
    gathering = computing = exchanging = 0.0
    seat.model.train()
    clock = time.perf_counter()
    columns: Iterable[Any] = batches
    for number, (chosen, total, tensors) in enumerate(zip(positions, of_steps, columns, strict=True)):
        batch = dict(zip(names, tensors, strict=True))
        seat.step.check(batch, partition.sample_ids[chosen])
        began = time.perf_counter()
        if number % fit.accumulate == 0:
            seat.optimizer.zero_grad()
        ends = (number + 1) % fit.accumulate == 0 or number + 1 == len(positions)
        with contextlib.nullcontext() if ends else seat.model.no_sync():
            with _refusing_single_sample(partition, fit.batch_size, len(chosen)):
                loss = seat.step.loss(seat.model, batch)
            # The weight makes the mean over ranks the mean over samples.
            (loss * (len(chosen) * group.size / total)).backward()
        gathering += began - clock
        waited = 0.0
        if ends:
            waited = time.perf_counter() - seat.computed
            if fit.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(seat.model.parameters(), fit.max_grad_norm)
            seat.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # otherwise the time of this step would count as that of the next batch
        clock = time.perf_counter()
        exchanging, computing = exchanging + waited, computing + clock - began - waited
    return PhaseSeconds(batches=gathering, forward_backward=computing, gradient_exchange=exchanging)


@contextlib.contextmanager
def _refusing_single_sample(partition: Partition, batch_size: int, n_samples: int) -> Iterator[None]:
    """Say what to do if a normalization refuses a mini-batch of one sample. It accepts one if its channels have more
    values, as those of images do.
    """
    try:
        yield
    except ValueError as error:
        if n_samples > 1 or not str(error).startswith("Expected more than 1 value per channel"):
            raise
        smallest, largest = partition.shares
        raise InvalidParameter.of(
            "batch_size",
            batch_size,
            "large enough to give every mini-batch at least 2 samples, which the module normalizes",
            f"Rank {partition.rank} has {len(partition)} samples, and one of its mini-batches has 1 sample: all ranks "
            f"have equally many mini-batches, and {smallest} to {largest} samples. Use larger mini-batches, more equal "
            "shares, fewer workers, or a module that normalizes each sample alone, such as LayerNorm.",
        ) from error


def _error(partition: Partition, seat: TrainingState, device: Any) -> float:
    """Sum of the error over all samples."""
    names = seat.step.arrays(partition.names)
    seat.model.eval()
    total = 0.0
    with torch.no_grad():
        for columns in partition.batches(EVALUATION_ROWS):
            batch = {name: tensor_of(columns[name]).to(device) for name in names}
            total += seat.step.error(seat.model.module, batch) * len(columns[names[0]])
    return total
