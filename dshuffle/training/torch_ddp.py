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
import psutil
from distributed import get_worker
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed
from dshuffle.planning.batching import UNEVEN
from dshuffle.runtime import Epoch, Group, Partition, Shuffler, gathered
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, Recorder, Validate
from dshuffle.training.inputs import EVALUATION_ROWS, check_names
from dshuffle.training.monitoring import EpochBreakdown, PhaseSeconds, with_records
from dshuffle.training.schedules import CONSTANT, Schedule

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
except ImportError as exc:
    raise ImportError(f"this needs PyTorch: pip install 'dshuffle[torch]' ({exc})") from exc

MakeModel = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Seat:
    """What a rank keeps in its process from epoch to epoch."""

    store: Any
    model: Any = None
    optimizer: Any = None
    first_steps: list[float] = field(default_factory=list)
    computed: float = 0.0
    """When the last gradients of the present step were there."""


_seats: dict[str, Seat] = {}
"""By the names of fits; one at a time, as a process has one default process group."""


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
) -> History[torch.nn.Module]:
    """Train a PyTorch classifier with DistributedDataParallel, one rank in every Dask worker process.

    Parameters
    ----------
    shuffler
        Any sharding, assignment and delivery; its workers must be processes of their own.
    make_model
        Makes the module, on every worker and here. Sent along, so a function of a script or a lambda will do.
    make_optimizer
        From the parameters to the optimizer, such as ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``.
    epochs
        Passes over the whole dataset.
    batch_size
        Samples of one worker in one step, at most. Every sample is trained on exactly once an epoch, in equally many
        mini-batches on all workers (the mode ``"uneven"`` of :meth:`dshuffle.Partition.to_torch`), so that no rank is
        left waiting and no ``Join`` is needed. (In ``fit_parameter_server`` it is what all workers take together.)
    loss
        Of the model's output and the labels: the mean over a mini-batch.
    seed
        Of ``torch.manual_seed``, before the model is made and, with the rank added, before every epoch.
    features, target
        Arrays of the dataset: ``(q, ...)`` floats, finite, and ``(q,)`` integer labels.
    schedule
        Factor by epoch on the learning rates that the optimizer begins with.
    validate
        Called here with the module (in evaluation mode) after every epoch; its metrics become the point's
        ``validation``. With it the state of the module is sent here once an epoch, and otherwise once.
    early_stopping
        When to end before ``epochs``.
    on_epoch
        Called with each epoch's point as soon as it is known.
    timeout
        Seconds that a rank waits for the others in one step.

    Returns
    -------
    History
        ``weights`` is the module, in evaluation mode. A point's ``error`` is the fraction of wrong labels over the
        whole dataset after the epoch. ``breakdown`` says where the seconds went: gradients are averaged while others
        are still being computed, so ``gradient_exchange`` is what is left of that after the last one, and the
        optimizer's step.

    Raises
    ------
    ImportError
        PyTorch is not installed, here or on a worker.
    InvalidParameter
        Two workers are threads of one process, a parameter is out of range, labels are no integers or features not
        finite (named by sample), or parameters diverge.
    WorkerLost
        A worker has left the cluster.

    Notes
    -----
    The gradients of mini-batches that differ in size are weighted by their samples. Batch norm is every rank's own;
    running statistics are averaged over ranks at the end of each epoch (DistributedDataParallel would have taken those
    of rank 0). Module and optimizer stay on the workers between epochs.

    gloo listens on a free port of each worker's host, on the interface that has the worker's address, unless
    ``GLOO_SOCKET_IFNAME`` names another.

    References
    ----------
    Paper 004 (Nguyen et al., IPDPS 2022), Figures 3 to 5. S. Li et al., "PyTorch distributed", VLDB 2020.

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
    name = uuid.uuid4().hex
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model().eval()
    recorder: Recorder[torch.nn.Module] = Recorder(validate, early_stopping, on_epoch)
    breakdown: dict[int, EpochBreakdown] = {}  # by the shuffler's numbers of epochs
    names = {"features": features, "target": target}
    epoch: Epoch | None = None
    try:
        for number, epoch in enumerate(shuffler.epochs(epochs)):
            if number == 0:
                _join_all(epoch, name, make_model, make_optimizer, seed, timeout)
            done = epoch.together(train, name, batch_size, loss, schedule(number), seed, **names)
            recorder.speeds.add([count / max(seconds.own, 1e-9) for _, count, seconds in done])
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
    """Host, process and address of a worker, and whether its process has a process group; a task on each worker."""
    address = str(get_worker().address)
    return socket.gethostname(), os.getpid(), address, dist.is_initialized()


def open_store(partition: Partition, name: str, host: str, size: int, timeout: float) -> int:
    """Let rank 0 listen on a free port, where all ranks find each other; a task on each worker."""
    if partition.rank:
        return 0
    limit = datetime.timedelta(seconds=timeout)
    _seats[name] = Seat(dist.TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False))
    return int(_seats[name].store.port)


def interface_of(host: str) -> str | None:
    """The interface with an address: by itself gloo goes where the machine's name leads, if that is anywhere."""
    address = socket.getaddrinfo(host, None)[0][4][0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)


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
    """Become a rank of the process group, with a model of one's own; a task on each worker."""
    limit = datetime.timedelta(seconds=timeout)
    if group.rank:
        _seats[name] = Seat(dist.TCPStore(*place, group.size, is_master=False, timeout=limit))
    seat = _seats[name]
    with leaving_if_it_fails(name):
        if found := interface_of(str(urlsplit(get_worker().address).hostname)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        dist.init_process_group("gloo", store=seat.store, rank=group.rank, world_size=group.size, timeout=limit)
        torch.manual_seed(seed)
        # Running statistics are averaged once an epoch, and not taken from rank 0 in every step.
        seat.model = DistributedDataParallel(make_model(), broadcast_buffers=False)
        # It refuses annotations that are text, as all of this module's are; a lambda has none.
        seat.model.register_comm_hook(seat, lambda seat, bucket: average(seat, bucket))
        seat.optimizer = make_optimizer(seat.model.parameters())
        seat.first_steps = [one["lr"] for one in seat.optimizer.param_groups]


def average(seat: Seat, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average some gradients over all ranks, and note when they were there."""
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
    """One epoch's steps together with all other ranks; wrong labels after it, samples and seconds; a task."""
    check_names(partition.names, features=features, target=target)
    with leaving_if_it_fails(name):
        seat = _seats[name]
        for one, first in zip(seat.optimizer.param_groups, seat.first_steps, strict=True):
            one["lr"] = first * factor
        torch.manual_seed(seed + 1_000_003 * partition.epoch + group.rank + 1)
        seconds = _steps(partition, group, seat, batch_size, loss, features, target)
        for buffer in seat.model.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= group.size
        if not all(torch.isfinite(one).all() for one in seat.model.parameters()):
            raise InvalidParameter.of(
                "make_optimizer",
                "the one given",
                "one whose parameters stay finite",
                f"They diverged in epoch {partition.epoch}: take a smaller step, or scale the features.",
            )
        return _wrong_labels(partition, seat, features, target), len(partition), seconds


def state_of(partition: Partition, name: str) -> bytes:
    """The state of the module, of rank 0; a task on each worker."""
    saved = io.BytesIO()
    if partition.rank == 0:
        torch.save(_seats[name].model.module.state_dict(), saved)
    return saved.getvalue()


def leave(partition: Partition | None, name: str) -> None:
    """Drop the model, and end the process group; a task on each worker. Idempotent."""
    seat = _seats.pop(name, None)
    if seat is not None:
        seat.model = seat.optimizer = None
        if dist.is_initialized():
            dist.destroy_process_group()


class leaving_if_it_fails:
    """Close the connections of a rank that fails, so that the others do not wait for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        leave(None, self.name)
        if isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "peer", "ProcessGroup")):
            raise PeerFailed(f"another rank has failed, or cannot be reached: {error}") from error


def _steps(
    partition: Partition, group: Group, seat: Seat, batch_size: int, loss: Loss, features: str, target: str
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
        # The mean over ranks is to be the mean over samples.
        (loss(scores, y.long()) * (len(y) * group.size / total)).backward()
        seat.optimizer.step()
        gathering, computing = gathering + began - clock, computing + seat.computed - began
        clock = time.perf_counter()
        exchanging += clock - seat.computed
    return PhaseSeconds(batches=gathering, forward_backward=computing, gradient_exchange=exchanging)


def checked(x: torch.Tensor, y: torch.Tensor, features: str, target: str, sample_ids: NDArray[np.int64]) -> None:
    """Refuse what cannot be trained on.

    Raises
    ------
    InvalidParameter
        Features are not finite, named by sample, or labels are no integers.
    """
    if y.is_floating_point() or y.is_complex() or y.ndim != 1:
        raise InvalidParameter.of("target", target, f"a 1-D array of integer labels (it is {y.ndim}-D, {y.dtype})")
    finite = torch.isfinite(x).reshape(len(x), -1).all(dim=1)
    if not finite.all():
        bad = int(finite.int().argmin())
        raise InvalidParameter.of("features", features, f"finite everywhere; sample {sample_ids[bad]} is not")


def _wrong_labels(partition: Partition, seat: Seat, features: str, target: str) -> int:
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
        raise InvalidParameter.of(
            "shuffler",
            "one with workers that are threads of one process",
            "one whose workers are processes of their own",
            "A process has one default process group. Use LocalCluster(processes=True).",
        )
    taken = [rank for rank, (_, _, _, initialized) in enumerate(found) if initialized]
    if taken:
        raise ClusterError(
            f"ranks {taken} have a process group already: another fit is under way on these workers, or was cut off "
            "(then restart them)"
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
    except (DShuffleError, OSError):  # the session is over; what was lost needs not leave
        return
