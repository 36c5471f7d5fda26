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
import psutil
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed, WorkerLost, reasons_of
from dshuffle.integrations import INSTALL_TORCH
from dshuffle.planning.batching import UNEVEN
from dshuffle.runtime import Group, Partition
from dshuffle.training.inputs import EVALUATION_ROWS, check_converging

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
    """What all ranks of a fit need to know: ``fit_torch_ddp``'s parameters, its first epoch and its state before it."""

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
        return copy.deepcopy((self.model.module.state_dict(), self.optimizer.state_dict()))

    def load(self, state: tuple[Any, Any]) -> None:
        """Load a state of model and optimizer."""
        self.model.module.load_state_dict(state[0])
        # An optimizer takes tensors as they are, and would train on those that another restart needs.
        self.optimizer.load_state_dict(copy.deepcopy(state[1]))


_processes: dict[str, Process] = {}
"""By name of the fit. One at a time has a model, as a process has one default process group."""


def train(
    partition: Partition, group: Group, fit: Fit, factor: float, sent: tuple[bool, bool]
) -> tuple[bytes, float, int, float, float, float]:
    """Train for one epoch, in step with all other ranks. Runs as a task on each worker.

    Returns the state of the module, and of the optimizer, if they are to be sent, of rank 0; the sum of errors; the
    number of samples and the seconds of ``History.breakdown``.
    """
    partition.mark_trained(0)
    fit.step.arrays(partition.names)  # refuses missing arrays, before the ranks wait for each other
    to_device(fit.device)  # and a device that is not there
    process, epoch = _processes.setdefault(fit.name, Process()), partition.epoch
    # Before this succeeds, the model is not this call's: Dask may compute the lost result of an earlier call again.
    numbers = _sums(group, np.where(np.arange(group.size) == group.rank, process.number, 0))
    with _leaving_on_errors(process):
        if min(numbers) == 0 or len(set(numbers)) > 1:
            _join(process, partition, group, fit)
        process.beginnings = {number: state for number, state in process.beginnings.items() if number >= epoch}
        process.beginnings.setdefault(epoch, process.state())
        for options, first in zip(process.optimizer.param_groups, process.first_steps, strict=True):
            options["lr"] = first * factor if isinstance(first, torch.Tensor) else float(first * factor)
        torch.manual_seed(fit.seed + 1_000_003 * epoch + group.rank + 1)
        seconds = _steps(partition, group, process, fit)
        partition.note_waiting(seconds[2])
        [total] = _sums(group, np.array([len(partition)]))
        for buffer in process.model.module.buffers():
            if buffer.is_floating_point():
                buffer *= len(partition) / total
                dist.all_reduce(buffer)
        if not all(torch.isfinite(parameter).all() for parameter in process.model.parameters()):
            check_converging("make_optimizer", epoch, np.inf)
        process.beginnings[epoch + 1] = process.state()
        partition.mark_trained()
        saved = io.BytesIO()
        if sent[0] and group.rank == 0:
            torch.save(process.beginnings[epoch + 1][: 1 + sent[1]], saved)
        return saved.getvalue(), _error(partition, process, fit), len(partition), *seconds


def read_state(state: bytes) -> tuple[Any, ...]:
    """The states of module and optimizer that :func:`train` returned."""
    # From our own workers, or from a checkpoint, which is unpickled anyway. Optimizers may keep any object.
    read: tuple[Any, ...] = torch.load(io.BytesIO(state), weights_only=False, map_location="cpu")
    return read


def end(name: str) -> None:
    """Drop all that the process has of a fit. Runs on each worker. Idempotent."""
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


def _sums(group: Group, numbers: NDArray[np.integer[Any]]) -> list[int]:
    """The sums of integers below 2^31 over all ranks."""
    return [round(mean * group.size) for mean in group.mean(numbers.astype(np.float64)).tolist()]


def interface_of(host: str) -> str | None:
    """Return the interface with the host's address. By default gloo uses that of the host name, if it resolves."""
    address = socket.getaddrinfo(host, None)[0][4][0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if any(entry.address == address for entry in addresses)), None)


def _join(process: Process, partition: Partition, group: Group, fit: Fit) -> None:
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
    numbers = np.zeros(2, np.int64)  # by rank 0: the port of its store, and the number of the group
    if group.rank == 0:
        store = dist.TCPStore(host, 0, group.size, is_master=True, timeout=limit, wait_for_workers=False)
        numbers[:] = store.port, 1 + secrets.randbelow(2**31 - 1)
    port, number = _sums(group, numbers)
    store = store or dist.TCPStore(host, port, group.size, is_master=False, timeout=limit)
    if interface := interface_of(str(urlsplit(get_worker().address).hostname)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    _sums(group, numbers)  # fails at once if a rank has gone, where the next line would wait for it
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
    if partition.epoch > fit.first_epoch:  # from the first rank that has it
        having = torch.zeros(group.size)
        having[group.rank] = float(partition.epoch in process.beginnings)
        dist.all_reduce(having)
        if not having.any():
            raise WorkerLost("no worker with the model is left. Start the fit again, or continue it from a checkpoint")
        states: list[Any] = [process.beginnings.get(partition.epoch)]
        dist.broadcast_object_list(states, src=int(having.argmax()), device=torch.device("cpu"))
        process.load(states[0])
    elif fit.beginning is not None:
        process.load(read_state(fit.beginning))


_SYNC_BUFFERS = next(  # PyTorch 2.14 renames it
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def _average(process: Process, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, and note when the bucket was ready."""
    process.computed = time.perf_counter()
    future: torch.futures.Future[torch.Tensor] = allreduce_hook(dist.group.WORLD, bucket)
    return future


def _steps(partition: Partition, group: Group, process: Process, fit: Fit) -> tuple[float, float, float]:
    names = fit.step.arrays(partition.names)
    # The only kind that refuses a single sample as a rule: images have more values in a channel.
    least = 2 if any(isinstance(module, torch.nn.BatchNorm1d) for module in process.model.modules()) else 1
    device = torch.device(fit.device)
    batches = PartitionBatches(partition, fit.batch_size, mode=UNEVEN, arrays=names, least=least, device=device)
    positions = [batches.batching.positions(number) for number in range(len(batches))]
    totals = torch.tensor([float(len(batch)) for batch in positions])
    dist.all_reduce(totals)
    # Samples of all ranks in the step of the optimizer that a mini-batch belongs to.
    of_steps = [float(part.sum()) for part in totals.split(fit.accumulate) for _ in part]
    gathering = computing = exchanging = 0.0
    process.model.train()
    clock = time.perf_counter()
    columns: Iterable[Any] = batches
    for number, (chosen, total, tensors) in enumerate(zip(positions, of_steps, columns, strict=True)):
        batch = dict(zip(names, tensors, strict=True))
        fit.step.check(batch, partition.sample_ids[chosen])
        began = time.perf_counter()
        if number % fit.accumulate == 0:
            process.optimizer.zero_grad()
        ends = (number + 1) % fit.accumulate == 0 or number + 1 == len(positions)
        with contextlib.nullcontext() if ends else process.model.no_sync():
            with _refusing_single_sample(partition, fit.batch_size, len(chosen)):
                loss = fit.step.loss(process.model, batch)
            # The weight makes the mean over ranks the mean over samples.
            (loss * (len(chosen) * group.size / total)).backward()
        gathering += began - clock
        waited = 0.0
        if ends:
            waited = time.perf_counter() - process.computed
            if fit.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(process.model.parameters(), fit.max_grad_norm)
            process.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # otherwise the time of this step would count as that of the next batch
        clock = time.perf_counter()
        exchanging, computing = exchanging + waited, computing + clock - began - waited
    return gathering, computing, exchanging


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


def _error(partition: Partition, process: Process, fit: Fit) -> float:
    """Sum of the error over all samples."""
    names = fit.step.arrays(partition.names)
    process.model.eval()
    total = 0.0
    with torch.no_grad():
        for columns in partition.batches(EVALUATION_ROWS):
            batch = {name: tensor_of(columns[name]).to(fit.device) for name in names}
            total += fit.step.error(process.model.module, batch) * len(columns[names[0]])
    return total
