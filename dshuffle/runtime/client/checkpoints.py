"""How far a session has come: as a state from which another one continues, and as a checkpoint with this state."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import operator
import os
import platform
import posixpath
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from distributed.protocol.pickle import dumps, loads

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, DatasetError, InvalidParameter
from dshuffle.planning import Choices, GivenSharding, Remainder, WorkerHistory
from dshuffle.planning.exchange_epochs import largest_share
from dshuffle.planning.randomness import DRAW_VERSION
from dshuffle.planning.remainder import SampleDigest
from dshuffle.private_files import lock_file, open_private_file, read_own_file
from dshuffle.runtime.client.epoch import EpochTasks
from dshuffle.runtime.dataset_inputs import checked_sharding, resolved
from dshuffle.store import Dataset
from dshuffle.store.places import canonical_url, is_local, read_object, write_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 3
"""Version of the format of states and checkpoints."""

CARRYING = {"delivery", "relay"}
"""Choices that say how samples travel, and not who trains on which."""

SIZING = {"shares"}
"""Choices of the sizes of shares, which a session may change. The history of the workers has the sizes."""

CHOICES = {field.name for field in dataclasses.fields(Choices)}
"""The keywords of a shuffler that choose a way of shuffling."""

CHOOSING = CHOICES - CARRYING - SIZING - {"sharding"} | {"first_epoch"}
"""Parameters of a shuffler that choose the samples. They come from the state. (So does ``sharding``, with a check.)"""

PATIENCE = 10.0
"""Seconds for which an open session tries to write its checkpoint."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""First and longest pause in seconds between two attempts."""

BUCKETS = {"s3", "gs", "gcs", "az", "abfs"}
"""Schemes whose URLs name a bucket in place of a host."""

NOTHING = SampleDigest()


def shuffle_digest(dataset: Dataset, choices: Choices) -> str:
    """Digest of the layout of rows, and of what decides who trains on what, except the workers."""
    state = SessionState.of(dataset, choices, WorkerHistory(1), Remainder(0, ())).to_dict()
    choosing = {name: value for name, value in state["choices"].items() if name not in CARRYING | SIZING}
    text = json.dumps([{**state, "choices": choosing}, repr(dataset.layout)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SessionState:
    """Where a session is. A sharding that was given is known by its name, and by the checksum of its ranks."""

    dataset: str  # its identity
    n_samples: int
    choices: Choices
    sharding_checksum: int | None
    n_broadcast: int  # number of samples that all workers train on
    history: WorkerHistory
    remainder: Remainder  # the epoch, and how far the ranks have come in it
    attached: str | None = field(default=None, repr=False)  # a value of the user, as :func:`pickled` writes it

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        choices: Choices,
        history: WorkerHistory,
        remainder: Remainder,
        attached: str | None = None,
    ) -> Self:
        """The state of a session on a dataset."""
        checksum, n_broadcast = None, 0
        if isinstance(choices.sharding, GivenSharding):
            checksum, n_broadcast = choices.sharding.checksum, choices.sharding.n_broadcast
        names = choices.by_name()
        return cls(dataset.identity, dataset.n_samples, names, checksum, n_broadcast, history, remainder, attached)

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON can hold it."""
        digest = self.remainder.digest
        return {
            "format": FORMAT,
            "draw_version": DRAW_VERSION,
            "dataset": self.dataset,
            "n_samples": self.n_samples,
            "choices": self.choices.to_dict(),
            "sharding_checksum": self.sharding_checksum,
            "n_broadcast": self.n_broadcast,
            **self.history.to_dict(),
            "epoch": self.remainder.epoch,
            "trained": [list(counts) for counts in self.remainder.trained],
            **({} if digest is None else {"trained_digest": digest.fields}),
            "trained_weights": [list(weights) for weights in self.remainder.weights],
            "attached": self.attached,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], dataset: Dataset) -> Self:
        """Check a state, and that it is one of this dataset."""
        try:
            if (state["format"], state["draw_version"]) != (FORMAT, DRAW_VERSION):
                raise CheckpointError(
                    f"the state has format {state['format']!r} and draw version {state['draw_version']!r}, and this "
                    f"release of dshuffle has {FORMAT} and {DRAW_VERSION}: other samples would be trained on. Use the "
                    "release that wrote it"
                )
            if (state["dataset"], state["n_samples"]) != (dataset.identity, dataset.n_samples):
                raise CheckpointError(
                    f"the state belongs to another dataset ({state['dataset']}, {state['n_samples']} samples) than "
                    f"{dataset.url} ({dataset.identity}, {dataset.n_samples} samples). Open the dataset that "
                    "it belongs to; if that was a part, split the dataset in the same way again. Data that were "
                    "written again, with overwrite=True for example, are another dataset"
                )
            digest = None
            if state.get("trained_digest") is not None:
                count, total, first, second = map(operator.index, state["trained_digest"])
                digest = SampleDigest(count, total, first, second)
            remainder = Remainder(
                as_integer("epoch", state["epoch"], 0),
                tuple(tuple(map(operator.index, counts)) for counts in state["trained"]),
                digest,
                tuple(tuple(map(operator.index, weights)) for weights in state["trained_weights"]),
            )
            history = WorkerHistory.from_dict(state)
            if remainder.trained:
                counts, weights = remainder.sessions[-1]
                begins = WorkerHistory(len(counts), first_weights=weights)
                history = history.trained_in(remainder.epoch, len(counts), weights) if history.changes else begins
            loaded = cls(
                dataset.identity,
                dataset.n_samples,
                Choices.from_dict(state["choices"]),
                state["sharding_checksum"],
                as_integer("n_broadcast", state["n_broadcast"], 0),
                history,
                remainder,
                state["attached"],
            )
            loaded._check()
        except (InvalidParameter, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state is damaged ({type(error).__name__}: {error})") from error
        return loaded

    def _check(self) -> None:
        """Refuse numbers that no session can have written."""
        remainder, sessions = self.remainder, self.remainder.sessions
        if remainder.digest is not None and remainder.digest.count != remainder.total:
            allowed = f"{remainder.digest.count} samples, as in trained_digest"
            raise InvalidParameter.of("trained", remainder.trained, allowed, "If you changed it, remove that field.")
        as_integer("epoch", remainder.epoch, self.history.epoch)
        if len({(len(counts), weights) for counts, weights in sessions}) == 1:
            # Every rank went on with its own samples.
            sessions = [(tuple(map(sum, zip(*remainder.trained, strict=True))), sessions[0][1])]
        for counts, weights in sessions:
            unit = self.choices.assignment.unit_for(self.n_samples, len(counts))
            share = largest_share(self.n_samples - self.n_broadcast, len(counts), unit, weights) + self.n_broadcast
            if max(counts) > share:
                raise InvalidParameter.of("trained", counts, f"at most {share} samples of each rank")

    @property
    def next(self) -> Remainder:
        """Where to go on: in the middle of the epoch, or with the next one if nothing is left of it."""
        # A sample that all workers train on counts once for each worker.
        done = self.remainder.total == self.n_samples + (self.history.n_workers - 1) * self.n_broadcast
        return Remainder(self.remainder.epoch + 1, ()) if done else self.remainder

    def keywords(self, dataset: Dataset, options: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of a :class:`dshuffle.Shuffler` that goes on, with options of the user."""
        asked = {**self.choices.keywords(), **options}
        saved = {**self.choices.to_dict(), "first_epoch": self.next.epoch}
        choices = Choices(**{name: asked[name] for name in CHOICES - {"sharding"}})
        chosen = {**resolved(dataset, choices).to_dict(), "first_epoch": asked.get("first_epoch")}
        for name in sorted(CHOOSING & options.keys()):
            if chosen[name] != saved[name]:
                hint = "Make a new Shuffler to train on other samples."
                raise InvalidParameter.of(name, options[name], f"left out, or {saved[name]!r} as before", hint)
        keywords = {**asked, "first_epoch": self.next.epoch}
        if self.sharding_checksum is not None or "sharding" in options:
            try:
                sharding = checked_sharding(dataset, keywords["sharding"])
            except InvalidParameter as error:
                raise CheckpointError(f"the sharding of the earlier session must be given again: {error}") from error
            checksum = sharding.checksum if isinstance(sharding, GivenSharding) else None
            if checksum != self.sharding_checksum or str(sharding) != str(self.choices.sharding):
                raise CheckpointError(
                    f"sharding={str(sharding)!r} is not the one of the earlier session, {str(self.choices.sharding)!r}"
                )
            keywords["sharding"] = sharding
        return keywords


class SessionPosition:
    """The current epoch of a session, and the state from which another session can continue.

    It begins with a state that says what earlier sessions have trained on in the first epoch.
    """

    def __init__(self, state: SessionState) -> None:
        self._state, self._start = state, state.remainder
        self.tasks: EpochTasks | None = None  # of the current epoch
        self.ended = False  # whether the current epoch has ended, and the next one has not begun
        # The last epoch whose results the attached value has, as far as the loop has said.
        self._covered = self._start.epoch - 1
        self._histories: dict[int, WorkerHistory] = {}  # of the epochs from the next one that is not covered
        self._recorded: Remainder | None = None  # what is left of the current epoch, according to the last state

    def begin(self, tasks: EpochTasks, history: WorkerHistory, left: Remainder | None = None) -> None:
        """Make an epoch the current one, with the workers that train in it, on what is left of it."""
        self.tasks, self.ended, self._recorded, self._start = tasks, False, None, left or self._start
        self._state = dataclasses.replace(self._state, history=history)
        self._histories[tasks.epoch] = history

    def left(self) -> Remainder:
        """What is left of the current epoch, or the next one: where a session goes on from the last state in it."""
        reached = self._recorded or self._remainder((), NOTHING)
        return dataclasses.replace(self._state, remainder=reached).next

    @property
    def attached(self) -> Any:
        """A copy of the value that travels with the state."""
        if self._state.attached is None:
            return None
        try:
            return loads(base64.b64decode(self._state.attached, validate=True))
        except Exception as error:  # whatever the value's own code raises
            raise CheckpointError(f"the value that is attached to the state cannot be read: {error}") from error

    def attach(self, value: Any, epoch: int | None) -> None:
        """Keep a value, and the last epoch whose results it has. See :meth:`dshuffle.Shuffler.attach`."""
        first, tasks = self._start.epoch, self.tasks
        latest = first - 1 if tasks is None else tasks.epoch
        if epoch is None:
            epoch = latest if tasks is None or self.ended or tasks.any_call_done else latest - 1
            if self._covered < epoch - 1:
                missing = f"nothing was attached in epoch {epoch - 1}, so its results may be missing"
                hint = "Give the last epoch whose results the value has: shuffler.attach(value, epoch)."
                raise InvalidParameter.because("epoch", missing, hint)
        elif not first - 1 <= as_integer("epoch", epoch) <= latest:
            raise InvalidParameter.of("epoch", epoch, f"in [{first - 1}, {latest}], the epochs that have begun")
        try:  # at once: what is changed in place later belongs to another position
            text = None if value is None else base64.b64encode(dumps(value)).decode()
        except Exception as error:  # whatever the value's own code raises
            raise CheckpointError(f"the value that was attached to the session cannot be pickled: {error}") from error
        self._state, self._covered = dataclasses.replace(self._state, attached=text), epoch
        self._histories = {number: history for number, history in self._histories.items() if number > epoch}

    def state(self, counts: tuple[int, ...] = (), digest: SampleDigest = NOTHING) -> dict[str, Any]:
        """The state, as :meth:`dshuffle.Shuffler.state_dict` returns it."""
        reached, history, first = self._remainder(counts, digest), self._state.history, self._covered + 1
        if self._state.attached is not None and reached.epoch >= first:  # what the value does not have is trained again
            reached = self._start if first == self._start.epoch else Remainder(first, ())
            history = self._histories.get(first, history)
        if self.tasks is not None and reached.epoch == self.tasks.epoch:
            self._recorded = reached
        return dataclasses.replace(self._state, history=history, remainder=reached).to_dict()

    def _remainder(self, counts: tuple[int, ...], digest: SampleDigest) -> Remainder:
        if self.tasks is None:
            return self._start
        if self.ended:
            return Remainder(self.tasks.epoch + 1, ())
        earlier = self._start if self._start.epoch == self.tasks.epoch else Remainder(self.tasks.epoch, ())
        return earlier.followed_by(counts, digest, self._state.history.weights) if any(counts) else earlier


class Checkpoint:
    """A file or an object for the state of a session on a dataset. A file may be locked for one open session.

    A line of JSON is followed by the bytes of the attached value. The lock is on a file beside the checkpoint, which
    stays. It goes away with the process, however that ends. Objects in stores have no locks.
    """

    def __init__(self, url: str | os.PathLike[str], dataset: Dataset, *, was_used: bool = False) -> None:
        self.url, self._dataset = url, dataset
        self.was_used = was_used  # so that it is only away for a moment if it cannot be read or written
        self._lock = -1
        try:
            self.place = canonical_url(url)
        except InvalidParameter:
            self.place = ""
        scheme, _, rest = self.place.rpartition("://")
        if not posixpath.basename(rest) or (scheme and not posixpath.dirname(rest)):
            allowed = 'a file or an object in a folder, such as "s3://bucket/run.json"'
            raise InvalidParameter.of("checkpoint", url, allowed)
        checkpoint, store = urlsplit(self.place), urlsplit(dataset.url)
        # Options of the dataset's store may be credentials, which no other host should see.
        alike = checkpoint.scheme == store.scheme and (checkpoint.netloc == store.netloc or store.scheme in BUCKETS)
        self._options = dataset.storage_options if alike and checkpoint.scheme else None

    def lock(self, *, must_exist: bool = False) -> None:
        """Keep other sessions from a file, and write beside it who has it. With ``must_exist``, no folder is made."""
        if not is_local(self.place):
            return
        if must_exist and not os.path.lexists(self.place):
            self.read_state()  # raises
        file = -1
        try:
            os.makedirs(os.path.dirname(self.place), 0o755, exist_ok=True)
            file = open_private_file(f"{self.place}.lock", os.O_RDWR | os.O_CREAT)
            lock_file(file)
        except BlockingIOError as error:
            owner = os.pread(file, 1000, 0).decode(errors="replace")
            os.close(file)
            raise CheckpointError(
                f"the checkpoint {self.place} is in use by another open session ({owner}). Close that session, or "
                "choose another place"
            ) from error
        except OSError as error:
            if file < 0:
                raise CheckpointError(f"the checkpoint {self.place} cannot be written: {error}") from error
            logger.warning("dshuffle: nothing keeps sessions apart, as %s cannot be locked: %s", self.place, error)
        self._lock = file
        with contextlib.suppress(OSError):  # a full disk: the state itself will say so
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)

    def release(self) -> None:
        """Leave the checkpoint to other sessions. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def check_empty(self) -> None:
        """Refuse to overwrite the state of another session."""
        if (state := self.read()) is not None:
            raise CheckpointError(
                f"there is a checkpoint at {self.url}, of epoch {state.get('epoch')}. Go on with it (Shuffler.resume "
                "or dshuffle.run_with_retries), choose another place, or remove it"
            )

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the state at once or not at all. It is tried for some seconds, but only once in the beginning."""
        value = base64.b64decode(state["attached"] or "")
        head = {"state": {**state, "attached": None}, "attached_nbytes": len(value)}
        data = json.dumps({"checksum": _checksum(head, value), **head}).encode() + b"\n" + value

        def write() -> None:
            if self.was_used and is_local(self.place):
                os.stat(os.path.dirname(self.place))  # it is away, and must not be made again
            write_object(self.place, data, self._options)

        self._insist(write, "written, and an earlier one stays as it is", PATIENCE if self.was_used else 0.0)
        self.was_used = True

    def read(self, patience: float = 0.0) -> dict[str, Any] | None:
        """Read the state; None if there is none."""

        def read() -> bytes | None:
            # An attached value is unpickled, which runs code.
            data = read_own_file(self.place) if is_local(self.place) else read_object(self.place, self._options)
            if data is None and self.was_used:
                raise FileNotFoundError(errno.ENOENT, "it was there before, and is missing now")
            return data

        data = self._insist(read, "read", patience)
        if data is None:
            return None
        try:
            line, _, value = data.partition(b"\n")
            if not line.startswith(b'{"checksum":'):  # a state that the user has written
                return dict(json.loads(data))
            head = json.loads(line)
            if (head.pop("checksum"), head["attached_nbytes"]) != (_checksum(head, value), len(value)):
                raise ValueError("its checksum is wrong")
            return {**head["state"], "attached": base64.b64encode(value).decode() if value else None}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint {self.url} is damaged: {error}") from error

    def read_state(self) -> dict[str, Any]:
        """Read the state, which must be there."""
        if (state := self.read()) is None:
            hint = "Correct the path, or start a new session that writes it"
            raise CheckpointError(f"there is no checkpoint at {self.url}. {hint}")
        return state

    def _insist(self, ask: Callable[[], T], what: str, patience: float) -> T:
        # A file system that has failed at a place that was never used will fail again.
        end, pause = time.monotonic() + patience, FIRST_PAUSE
        while True:
            try:
                return ask()
            except (OSError, DatasetError) as error:
                failure = f"the checkpoint {self.url} cannot be {what} ({error})"
                transient = self.was_used or getattr(error, "transient", False)
                if not transient or time.monotonic() + pause > end:
                    raise CheckpointError(failure, transient=transient) from error
                if pause == FIRST_PAUSE:
                    logger.warning("dshuffle: %s. It is tried again for %g s", failure, patience)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _checksum(head: Mapping[str, Any], value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(json.dumps(head, sort_keys=True).encode()))
