"""Where a script that a launcher has started begins: :func:`dshuffle.spmd`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from distributed import Security

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.launched.epoch_batches import Convert, EpochBatches, batching_of
from dshuffle.launched.launcher import check_alone, check_process_group, is_launched, place_of
from dshuffle.launched.loader import SpmdLoader, check_shares
from dshuffle.launched.ports import Terms
from dshuffle.launched.rank import Rank
from dshuffle.launched.secret import AUTO
from dshuffle.planning.batching import MODES, UNEVEN
from dshuffle.planning.shares import EVEN
from dshuffle.redaction import short_repr
from dshuffle.runtime import Partition, Shuffler
from dshuffle.runtime.settings import as_seconds
from dshuffle.store import Dataset, as_dataset
from dshuffle.store import Place as DatasetPlace

logger = logging.getLogger(__name__)

REFUSED = {
    "on_loss": "A rank that is lost ends the job, and the launcher starts it again.",
    "elastic": "The number of ranks is that of the launcher. A job that resumes may have another one.",
    "min_workers": "The session waits for all ranks.",
    "workers": "Each rank is a worker.",
    "client": "The job has a scheduler of its own.",
    "server": "Each rank trains, and rank 0 serves if the delivery needs a server.",
}
"""Parameters of a shuffler that a script cannot choose."""


def spmd(
    dataset: Dataset | DatasetPlace,
    *,
    batch_size: int,
    mode: str = UNEVEN,
    arrays: Sequence[str] | None = None,
    device: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    port: int | None = None,
    interface: str | None = None,
    security: Security | None = None,
    secret: str | None = AUTO,
    timeout: str | float = "5m",
    **options: Any,
) -> SpmdLoader:
    """Give each process of a script that torchrun, srun or mpirun has started its batches of every epoch.

    The script keeps its loop. Call this on all ranks, alike, and use what it returns in a ``with`` statement. See
    docs/launchers.md.

    Parameters
    ----------
    dataset
        A :class:`Dataset`, or the URL of one that all ranks can open.
    batch_size
        Number of samples in a batch of one rank.
    mode
        How all ranks get the same number of batches. ``"uneven"``: every sample is in one batch, and the sizes of
        a rank's batches differ by at most one. ``"drop"``: all batches are full, and samples that do not fill one are
        left out. ``"pad"``: all batches are full, and the last ones repeat samples.
    arrays
        Names of the arrays of a batch, in this order; by default all arrays, in alphabetical order.
    device
        Device of PyTorch, such as ``"cpu"`` or ``"cuda"``: batches are tuples of tensors on it. By default they are
        tuples of NumPy arrays.
    checkpoint
        File or object to which rank 0 writes the position at the start of every epoch and after the last one, with the
        states of the objects that were attached (:meth:`SpmdLoader.attach`). If it exists, the job continues it, with
        any number of ranks.
    rank, world_size
        Rank of this process, and number of processes; by default those of the launcher. Without a launcher, the process
        is a job of one rank.
    address
        Name or IP address of the host of rank 0, for the other ranks; by default from the launcher.
    port
        Port on which rank 0 listens. By default all ranks derive some ports from the launcher's name of the job, and
        rank 0 takes the first one that is free. It is needed if no launcher says to which job a rank belongs.
    interface
        Network interface on which the ranks listen, if they are on several hosts; by default the one that leads to rank
        0. The ``address`` must be that of rank 0's host on it.
    security
        TLS certificates; by default those of Dask's configuration.
    secret
        Without TLS, processes that do not know this text cannot connect to the ranks. By default it is that of the
        environment variable ``DSHUFFLE_SECRET``, or a file that only the user can read, which is made at the first use.
        None: any process that reaches the ranks can connect and run code.
    timeout
        Time to wait for the other ranks at the start: seconds, or text such as ``"5m"``.
    **options
        Parameters of :class:`Shuffler`, such as ``assignment`` and ``seed``, except for those that concern the workers.

    Returns
    -------
    SpmdLoader
        The batches of this rank.

    Raises
    ------
    InvalidParameter
        If the value of a parameter is not allowed, or the variables of the launcher are incomplete.
    ImportError
        If a device is given, and PyTorch is not installed.
    DatasetError
        If the dataset cannot be opened.
    ClusterError
        If the other ranks do not come in time, or rank 0's port is not free.

    Examples
    --------
    >>> import numpy as np, dshuffle
    >>> dataset = dshuffle.create_dataset("memory://doc-spmd", {"x": np.arange(10.0), "y": np.arange(10)})
    >>> with dshuffle.spmd(dataset, batch_size=4, rank=0, world_size=1) as loader:
    ...     for epoch in loader.epochs(2):
    ...         print(epoch.number, [len(y) for x, y in epoch], sum(int(y.sum()) for x, y in epoch))
    0 [3, 3, 4] 45
    1 [3, 3, 4] 45
    """
    batch_size = as_integer("batch_size", batch_size, 1)
    if mode not in MODES:
        raise InvalidParameter.of("mode", mode, f"one of {list(MODES)}")
    _check_options(options)
    if not (security is None or isinstance(security, Security)):
        raise InvalidParameter.of("security", security, "a distributed.Security, or None")
    security = Security() if security is None else security
    seconds = as_seconds("timeout", timeout, positive=True)
    place = place_of(os.environ, rank=rank, world_size=world_size, address=address)
    convert: Convert | None = None
    if device is not None:
        convert = importlib.import_module("dshuffle.integrations.torch").to_device(device)
    opened = as_dataset(dataset)
    names = _names(opened, arrays)
    check_process_group(place.world_size)
    if place.world_size == 1 and rank is None and not is_launched(os.environ):
        check_alone()
        logger.warning("dshuffle: this process is the only rank of its job, because no launcher has started it")
    terms = _terms(opened, {"batch_size": batch_size, "mode": mode, **options})
    joined = Rank(place, terms, port=port, interface=interface, security=security, secret=secret, timeout=seconds)

    def batches(partition: Partition, is_rest: bool) -> EpochBatches:
        batching = batching_of(partition, batch_size, mode, is_rest=is_rest)
        return EpochBatches(partition, batching, names, joined, convert)

    return SpmdLoader(opened, joined, names, batches, checkpoint, options)


def _check_options(options: Mapping[str, Any]) -> None:
    for name, hint in REFUSED.items():
        if name in options:
            raise InvalidParameter.because(name, "a job chooses it itself", hint)
    check_shares(options.get("shares", EVEN))
    unknown = options.keys() - inspect.signature(Shuffler).parameters.keys()
    if unknown or any(name.startswith("_") for name in options):
        raise TypeError(f"spmd() got an unexpected keyword argument {min(unknown or options)!r}")


def _terms(dataset: Dataset, options: Mapping[str, Any]) -> Terms:
    """What is asked for, with the defaults of a shuffler."""
    terms = {}
    defaults = {name: each.default for name, each in inspect.signature(Shuffler).parameters.items() if name[0] != "_"}
    for name, value in {**defaults, **options}.items():
        if hasattr(value, "__array__"):
            text = hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
        else:  # an object that does not say what it is has an address, which differs between ranks
            text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        terms[name] = text, short_repr(value)
    return {**terms, "dataset": (dataset.identity, short_repr(dataset.url))}


def _names(dataset: Dataset, arrays: Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(sorted(dataset.layout.names))  # rows have an order of their own
    if arrays is None:
        return names
    if isinstance(arrays, str) or not arrays or not set(arrays) <= set(names):
        raise InvalidParameter.of("arrays", arrays, f"a list of names from {list(names)}")
    return tuple(arrays)
