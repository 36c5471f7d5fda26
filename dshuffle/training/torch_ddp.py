"""Synchronous SGD with PyTorch: DistributedDataParallel over gloo, inside Dask workers (extra ``torch``)."""

from __future__ import annotations

import datetime
import io
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.planning.batching import UNEVEN
from dshuffle.runtime import Epoch, Group, Partition, Shuffler, gathered
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import EVALUATION_ROWS, check_encryption, check_names
from dshuffle.training.monitoring import EpochBreakdown, PhaseSeconds, with_records
from dshuffle.training.network_interface import interface_of
from dshuffle.training.schedules import CONSTANT, Schedule

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
except ImportError as exc:
    raise ImportError(f"dshuffle.training.torch_ddp needs PyTorch: pip install 'dshuffle[torch]' ({exc})") from exc

MakeModel = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class TrainingState:
    """State that a rank keeps in its process from epoch to epoch."""

    store: Any
    model: Any = None
    optimizer: Any = None
    first_steps: list[float] = field(default_factory=list)
    computed: float = 0.0
    """Time at which the last gradients of the current step were ready."""


_seats: dict[str, TrainingState] = {}
"""State by name of the fit. There is one at a time, as a process has one default process group."""


def fit_torch_ddp(
    shuffler: Shuffler,
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    *,
    epochs: int,
    batch_size: int,
    loss: Loss = torch.nn.functional.cross_entropy,
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
    """Train a PyTorch classifier with DistributedDataParallel, with one rank in every Dask worker process.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery. Each worker must be a separate process.
    make_model
        Function that makes the module, called on every worker and in this process. It is sent to the workers, so a
        function of a script or a lambda works.
    make_optimizer
        Function from the parameters to the optimizer, such as
        ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``.
    epochs
        Number of passes over the whole dataset.
    batch_size
        Largest number of samples of one worker in one step. Every sample is trained on exactly once an epoch. All
        workers take the same number of mini-batches (the mode ``"uneven"`` of :meth:`dshuffle.Partition.to_torch`), so
        no rank is left waiting and ``Join`` is not needed. (In ``fit_parameter_server`` it is the number of samples of
        all workers together.)
    loss
        Function from the model's output and the labels to the mean loss over a mini-batch.
    seed
        Seed of ``torch.manual_seed``, set before the model is made and, with the rank added, before every epoch.
    features, target
        Names of arrays in the dataset: ``(q, ...)`` finite floats and ``(q,)`` integer labels.
    schedule
        Factor on the optimizer's initial learning rates by epoch.
    validate
        Function that is called in this process with the module (in evaluation mode) after every epoch. The metrics that
        it returns become the point's ``validation``. With it, the state of the module is sent to this process once an
        epoch, otherwise once at the end.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with each epoch's point as soon as it is known.
    timeout
        Seconds that a rank waits for the others in one step.
    plain_tcp
        Whether ranks may send gradients without encryption although the cluster uses TLS, as gloo cannot use TLS.

    Returns
    -------
    History
        ``weights`` is the module, in evaluation mode. A point's ``error`` is the fraction of wrong labels over the
        whole dataset after the epoch. ``breakdown`` is the time spent in each phase. PyTorch averages gradients while
        it still computes others, so ``gradient_exchange`` counts only the averaging after the last gradient, and the
        optimizer's step.

    Raises
    ------
    ImportError
        PyTorch is not installed in this process or on a worker.
    InvalidParameter
        Two workers are threads of one process, a parameter is out of range, labels are not integers, features are not
        finite (the message names the sample), or the parameters diverge.
    WorkerLost
        A worker has left the cluster.

    Notes
    -----
    If mini-batches differ in size, their gradients are weighted by the number of samples. Batch norm is local to each
    rank. Running statistics are averaged over ranks at the end of each epoch (DistributedDataParallel would use those
    of rank 0). Module and optimizer stay on the workers between epochs.

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
    as_integer("seed", seed)
    if not 0 < timeout < float("inf"):
        raise InvalidParameter.of("timeout", timeout, "a finite number of seconds > 0")
    check_encryption(shuffler.addresses[0], plain_tcp)
    name = uuid.uuid4().hex
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model().eval()
    recorder: Recorder[torch.nn.Module] = Recorder(validate, early_stopping, on_epoch)
    breakdown: dict[int, EpochBreakdown] = {}  # keyed by the shuffler's epoch number
    names = {"features": features, "target": target}
    epoch: Epoch | None = None
    try:
        for number, epoch in enumerate(shuffler.epochs(epochs)):
            if number == 0:
                _join_all(epoch, name, make_model, make_optimizer, seed, timeout)
            done = epoch.together(train, name, batch_size, loss, schedule(number), seed, **names)
            recorder.speeds.add(
                [count / max(seconds.own, 1e-9) for _, count, seconds in done],
                seconds=max(seconds.own for _, _, seconds in done),
            )
            breakdown[epoch.number] = EpochBreakdown(epoch=number, ranks=tuple(seconds for _, _, seconds in done))
            if validate is not None:
                _load_state(model, epoch, name)
            wrong, total = np.sum([(errors, count) for errors, count, _ in done], axis=0)
            if recorder.add(model, float(wrong / total)):
                break
        if epoch is not None:
            _load_state(model, epoch, name)
    finally:
        if epoch is not None:
            _leave_all(epoch, name)
    return recorder.history(model, with_records(breakdown, shuffler.records))


def where(partition: Partition) -> tuple[str, int, str, bool]:
    """Return a worker's host, process id, address, and whether a process group exists. Runs on each worker."""
    address = str(get_worker().address)
    return socket.gethostname(), os.getpid(), address, dist.is_initialized()


def open_store(partition: Partition, name: str, host: str, size: int, timeout: float) -> int:
    """Open the store on a free port of rank 0, where all ranks find each other. Runs as a task on each worker."""
    if partition.rank:
        return 0
    limit = datetime.timedelta(seconds=timeout)
    _seats[name] = TrainingState(dist.TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False))
    return int(_seats[name].store.port)


def join(
    partition: Partition,
    group: Group,
    name: str,
    place: tuple[str, int],
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    seed: int,
    timeout: float,
) -> None:
    """Join the process group, and make this rank's model and optimizer. Runs as a task on each worker."""
    limit = datetime.timedelta(seconds=timeout)
    if group.rank:
        _seats[name] = TrainingState(dist.TCPStore(*place, group.size, is_master=False, timeout=limit))
    seat = _seats[name]
    with leaving_if_it_fails(name):
        if found := interface_of(str(urlsplit(get_worker().address).hostname)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        dist.init_process_group("gloo", store=seat.store, rank=group.rank, world_size=group.size, timeout=limit)
        torch.manual_seed(seed)
        # Running statistics are averaged once an epoch instead of being copied from rank 0 in every step.
        seat.model = DistributedDataParallel(make_model(), broadcast_buffers=False)
        # register_comm_hook rejects string annotations, which this module has; a lambda does not have annotations.
        seat.model.register_comm_hook(seat, lambda seat, bucket: average(seat, bucket))
        seat.optimizer = make_optimizer(seat.model.parameters())
        seat.first_steps = [one["lr"] for one in seat.optimizer.param_groups]


def average(seat: TrainingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, and note when the bucket was ready."""
    seat.computed = time.perf_counter()
    future: torch.futures.Future[torch.Tensor] = allreduce_hook(dist.group.WORLD, bucket)
    return future


def train(
    partition: Partition,
    group: Group,
    name: str,
    batch_size: int,
    loss: Loss,
    factor: float,
    seed: int,
    *,
    features: str,
    target: str,
) -> tuple[int, int, PhaseSeconds]:
    """Train for one epoch, in step with all other ranks. Runs as a task on each worker.

    Returns the number of wrong labels after the epoch, the number of samples, and the seconds of each phase.
    """
    partition.mark_trained(0)
    check_names(partition.names, features=features, target=target)
    with leaving_if_it_fails(name):
        seat = _seat(name)
        for one, first in zip(seat.optimizer.param_groups, seat.first_steps, strict=True):
            one["lr"] = first * factor
        torch.manual_seed(seed + 1_000_003 * partition.epoch + group.rank + 1)
        seconds = _steps(partition, group, seat, batch_size, loss, features, target)
        for buffer in seat.model.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= group.size
        if not all(torch.isfinite(one).all() for one in seat.model.parameters()):
            raise InvalidParameter.because(
                "make_optimizer",
                f"the parameters diverged in epoch {partition.epoch}",
                "Take a smaller step, or scale the features.",
            )
        partition.mark_trained()
        return _wrong_labels(partition, seat, features, target), len(partition), seconds


def _seat(name: str) -> TrainingState:
    if name not in _seats:
        raise WorkerLost("a lost worker was replaced, and the new one lacks the model. Start the fit again")
    return _seats[name]


def state_of(partition: Partition, name: str) -> bytes:
    """Return the state of the module from rank 0, and empty bytes from other ranks. Runs on each worker."""
    saved = io.BytesIO()
    if partition.rank == 0:
        torch.save(_seat(name).model.module.state_dict(), saved)
    return saved.getvalue()


def leave(partition: Partition | None, name: str) -> None:
    """Drop the model and end the process group. Runs as a task on each worker. Idempotent."""
    seat = _seats.pop(name, None)
    if seat is not None:
        seat.model = seat.optimizer = None
        if dist.is_initialized():
            dist.destroy_process_group()


class leaving_if_it_fails:
    """Close the connections of a rank that fails, so that the other ranks do not wait for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        leave(None, self.name)
        if isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "peer", "ProcessGroup")):
            raise PeerFailed(f"another rank failed or cannot be reached: {error}") from error


def _steps(
    partition: Partition, group: Group, seat: TrainingState, batch_size: int, loss: Loss, features: str, target: str
) -> PhaseSeconds:
    batches = partition.to_torch(batch_size, mode=UNEVEN, arrays=(features, target))
    positions = [batches.batching.positions(number) for number in range(len(batches))]
    totals = torch.tensor([float(len(one)) for one in positions])
    dist.all_reduce(totals)
    dtype = next(seat.model.parameters()).dtype
    gathering = computing = exchanging = 0.0
    seat.model.train()
    clock = time.perf_counter()
    pairs: Iterable[Any] = batches
    for chosen, total, (x, y) in zip(positions, totals.tolist(), pairs, strict=True):
        checked(x, y, features, target, partition.sample_ids[chosen])
        began = time.perf_counter()
        seat.optimizer.zero_grad()
        scores = seat.model(x.to(dtype))
        # The weight makes the mean over ranks the mean over samples.
        (loss(scores, y.long()) * (len(y) * group.size / total)).backward()
        seat.optimizer.step()
        gathering, computing = gathering + began - clock, computing + seat.computed - began
        clock = time.perf_counter()
        exchanging += clock - seat.computed
    return PhaseSeconds(batches=gathering, forward_backward=computing, gradient_exchange=exchanging)


def checked(x: torch.Tensor, y: torch.Tensor, features: str, target: str, sample_ids: NDArray[np.int64]) -> None:
    """Check that a mini-batch can be trained on.

    Raises
    ------
    InvalidParameter
        Features are not finite (the message names the sample), or labels are not integers.
    """
    if y.is_floating_point() or y.is_complex() or y.ndim != 1:
        raise InvalidParameter.of("target", target, f"a 1-D array of integer labels (it is {y.ndim}-D, {y.dtype})")
    finite = torch.isfinite(x).reshape(len(x), -1).all(dim=1)
    if not finite.all():
        bad = int(finite.int().argmin())
        raise InvalidParameter.of(
            "features", features, f"an array of finite values (sample {sample_ids[bad]} is not finite)"
        )


def _wrong_labels(partition: Partition, seat: TrainingState, features: str, target: str) -> int:
    seat.model.eval()
    dtype = next(seat.model.parameters()).dtype
    wrong = 0
    with torch.no_grad():
        for batch in partition.batches(EVALUATION_ROWS):
            scores = seat.model.module(torch.from_numpy(batch[features]).to(dtype))
            wrong += int(np.count_nonzero(scores.argmax(dim=1).numpy() != batch[target]))
    return wrong


def _join_all(
    epoch: Epoch, name: str, make_model: MakeModel, make_optimizer: MakeOptimizer, seed: int, timeout: float
) -> None:
    found = gathered(epoch.map(where))
    if len({(host, process) for host, process, _, _ in found}) < len(found):
        raise InvalidParameter.because(
            "shuffler",
            "its workers are threads of one process, which has only one default process group",
            "Use LocalCluster(processes=True).",
        )
    taken = [rank for rank, (_, _, _, initialized) in enumerate(found) if initialized]
    if taken:
        raise ClusterError(
            f"ranks {taken} already have a process group: another fit is running on these workers or was interrupted; "
            "wait for it to end, or restart the workers"
        )
    host = str(urlsplit(found[0][2]).hostname)
    ports = gathered(epoch.map(open_store, name, host, len(found), timeout))
    epoch.together(join, name, (host, ports[0]), make_model, make_optimizer, seed, timeout)


def _load_state(model: torch.nn.Module, epoch: Epoch, name: str) -> None:
    saved = epoch.map(state_of, name)[0].result()
    model.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))


def _leave_all(epoch: Epoch, name: str) -> None:
    try:
        for future in epoch.map(leave, name):
            future.exception()
    except (DShuffleError, OSError):  # the session is over, and lost workers do not have to leave
        return
