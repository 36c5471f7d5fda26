"""How far a session has come, as a state from which another one continues."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from distributed.protocol.pickle import dumps, loads

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, InvalidParameter
from dshuffle.planning import Choices, GivenSharding, Remainder, WorkerHistory
from dshuffle.planning.exchange_epochs import largest_share
from dshuffle.planning.randomness import DRAW_VERSION
from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.client.checkpoint_file import CheckpointFile
from dshuffle.runtime.client.checkpoints import checkpoint_place, read_checkpoint
from dshuffle.runtime.client.epoch_tasks import EpochTasks
from dshuffle.runtime.dataset_inputs import checked_sharding
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


FORMAT = 3
"""Version of the format of states and checkpoints. Version 2 has no fields for fewer exchanges and unequal shares."""

READ_FORMATS = (2, FORMAT)

CARRYING = {"delivery", "relay"}
"""Choices that say how samples travel, and not who trains on which."""

SIZING = {"shares"}
"""Choices of the sizes of shares, which a session may change. The history of the workers has the sizes."""

CHOOSING = {field.name for field in dataclasses.fields(Choices)} - CARRYING - SIZING - {"sharding"} | {"first_epoch"}
"""Parameters of a shuffler that choose the samples. They come from the state. (So does ``sharding``, with a check.)"""

FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "draw_version": int,
    "dataset": str,
    "n_samples": int,
    "choices": dict,
    "sharding_checksum": (int, type(None)),
    "n_broadcast": int,
    "n_workers": int,
    "changes": list,
    "epoch": int,
    "trained": list,
    "attached": (str, type(None)),
}


def shuffle_digest(dataset: Dataset, choices: Choices) -> str:
    """Digest of the layout of rows, and of what decides who trains on what, except the workers."""
    state = SessionState.of(dataset, choices, WorkerHistory(1), Remainder(0, ())).to_dict()
    choosing = {name: value for name, value in state["choices"].items() if name not in CARRYING | SIZING}
    text = json.dumps([{**state, "choices": choosing}, repr(dataset.layout)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SessionState:
    """Where a session is.

    Parameters
    ----------
    dataset, n_samples
        Identity and number of samples of its dataset.
    choices
        Its way of shuffling. A sharding that was given is known by name alone.
    sharding_checksum, n_broadcast
        Checksum of the ranks of such a sharding, and the number of samples that all workers train on.
    history
        Its workers, and those before them.
    remainder
        The epoch, and how far the ranks have come in it.
    attached
        A value of the user, such as a model, as :func:`pickled` writes it.
    """

    dataset: str
    n_samples: int
    choices: Choices
    sharding_checksum: int | None
    n_broadcast: int
    history: WorkerHistory
    remainder: Remainder
    attached: str | None = field(default=None, repr=False)

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
        if isinstance(state, Mapping) and state.get("attached_nbytes"):
            raise CheckpointError("the first line of a checkpoint lacks the attached value. Give the place of the file")
        state = state.get("state", state) if isinstance(state, Mapping) else state  # as a checkpoint has it
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"a state must be a mapping, as Shuffler.state_dict returns it; this is {state!r:.80}"
            )
        if state.get("format", FORMAT) not in READ_FORMATS:
            raise CheckpointError(
                f"the state has format {state['format']!r}; this release of dshuffle reads the formats "
                f"{' and '.join(map(str, READ_FORMATS))}. Use the release that wrote it"
            )
        for name, kind in FIELDS.items():
            if not isinstance(state.get(name), kind) or isinstance(state[name], bool):
                raise CheckpointError(f"the state is damaged: {name}={state.get(name)!r:.80} is not allowed")
        if state["draw_version"] != DRAW_VERSION:
            raise CheckpointError(
                f"the state has draw version {state['draw_version']}, and this release of dshuffle draws with version "
                f"{DRAW_VERSION}: other samples would be trained on. Use the release that wrote it"
            )
        if (state["dataset"], state["n_samples"]) != (dataset.identity, dataset.n_samples):
            raise CheckpointError(
                f"the state belongs to another dataset ({state['dataset']}, {state['n_samples']} samples) than "
                f"{dataset.url} ({dataset.identity}, {dataset.n_samples} samples). Open the dataset that "
                "it belongs to; if that was a part, split the dataset in the same way again. Data that were written "
                "again, with overwrite=True for example, are another dataset"
            )
        try:
            trained = tuple(tuple(map(operator.index, each)) for each in state["trained"])
            digest = None
            if state.get("trained_digest") is not None:
                count, total, first, second = map(operator.index, state["trained_digest"])
                digest = SampleDigest(count, total, first, second)
            weights = tuple(tuple(map(operator.index, each)) for each in state.get("trained_weights", ()))
            remainder = Remainder(state["epoch"], trained, digest, weights)
            choices = Choices.from_dict(state["choices"])
            history = WorkerHistory.from_dict(state)
            if remainder.trained:
                counts, last_weights = remainder.sessions[-1]
                if history.changes:
                    history = history.trained_in(remainder.epoch, len(counts), last_weights)
                else:
                    history = WorkerHistory(len(counts), first_weights=last_weights)
        except (InvalidParameter, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the state is damaged: {error}") from error
        loaded = cls(
            dataset.identity,
            dataset.n_samples,
            choices,
            state["sharding_checksum"],
            state["n_broadcast"],
            history,
            remainder,
            state["attached"],
        )
        if not 0 <= loaded.n_broadcast <= dataset.n_samples:
            raise CheckpointError(f"the state is damaged: n_broadcast={loaded.n_broadcast} is not allowed")
        if remainder.epoch < 0 or remainder.total > loaded.n_trained_in_an_epoch:
            raise CheckpointError(
                f"the state is damaged: {remainder.total} samples were trained on in epoch {remainder.epoch}"
            )
        loaded._check_shares()
        if remainder.digest is not None and remainder.digest.count != remainder.total:
            raise CheckpointError(
                f"trained={state['trained']} of the state are {remainder.total} samples, and its trained_digest is "
                f"that of {remainder.digest.count} samples. If you have changed trained, remove trained_digest"
            )
        if history.epoch > remainder.epoch:
            raise CheckpointError(f"the state is damaged: workers changed in epoch {history.epoch}, which comes later")
        if remainder.trained and len(remainder.trained[-1]) != history.n_workers:
            raise CheckpointError(
                f"the state is damaged: n_workers={history.n_workers}, but {len(remainder.trained[-1])} ranks trained"
            )
        return loaded

    def _check_shares(self) -> None:
        """Refuse counts of more samples than a rank can have."""
        sessions = self.remainder.sessions
        if (
            len({(len(counts), weights) for counts, weights in sessions}) == 1
        ):  # every rank went on with its own samples
            sessions = [(tuple(map(sum, zip(*self.remainder.trained, strict=True))), sessions[0][1])]
        for counts, weights in sessions:
            unit = self.choices.assignment.unit_for(self.n_samples, len(counts))
            share = largest_share(self.n_samples - self.n_broadcast, len(counts), unit, weights) + self.n_broadcast
            if max(counts) > share:
                raise CheckpointError(
                    f"the state is damaged: a rank trained on {max(counts)} samples of epoch {self.remainder.epoch}, "
                    f"and each of {len(counts)} ranks has at most {share}"
                )

    @property
    def n_trained_in_an_epoch(self) -> int:
        """Number of samples of an epoch. A sample that all workers train on counts once for each worker."""
        return self.n_samples + (self.history.n_workers - 1) * self.n_broadcast

    @property
    def next(self) -> Remainder:
        """Where to go on: in the middle of the epoch, or with the next one if nothing is left of it."""
        done = self.remainder.total == self.n_trained_in_an_epoch
        return Remainder(self.remainder.epoch + 1, ()) if done else self.remainder

    def keywords(self, dataset: Dataset, options: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of a :class:`dshuffle.Shuffler` that goes on, with options of the user."""
        keywords = {**self.choices.keywords(), "first_epoch": self.next.epoch}
        for name in sorted(CHOOSING):
            if name in options and str(options[name]) != str(keywords[name]):
                hint = "Make a new Shuffler to train on other samples."
                raise InvalidParameter.of(name, options[name], f"left out, or {keywords[name]!s} as before", hint)
        keywords |= options
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


def pickled(value: Any) -> str:
    """Return a value as text for a state."""
    try:
        return base64.b64encode(dumps(value)).decode()
    except Exception as error:  # whatever the value's own code raises
        raise CheckpointError(f"the value that was attached to the session cannot be pickled: {error}") from error


def unpickled(text: str) -> Any:
    """Return the value that :func:`pickled` wrote."""
    try:
        return loads(base64.b64decode(text, validate=True))
    except Exception as error:  # whatever the value's own code raises
        raise CheckpointError(f"the value that is attached to the state cannot be read: {error}") from error


NOTHING = SampleDigest()


class SessionPosition:
    """The current epoch of a session, and the state from which another session can continue.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    start
        The first epoch, and what earlier sessions have trained on in it.
    history
        Returns the workers of the session.
    resumed
        State of the session that this one continues, if any.
    """

    def __init__(
        self,
        dataset: Dataset,
        choices: Choices,
        start: Remainder,
        history: Callable[[], WorkerHistory],
        resumed: SessionState | None = None,
    ) -> None:
        self._dataset = dataset
        self._choices = choices
        self._start = start
        self._history = history
        self.tasks: EpochTasks | None = None  # of the current epoch
        self.ended = False  # whether the current epoch has ended, and the next one has not begun
        self.next_epoch = start.epoch
        self._pickled = None if resumed is None else resumed.attached
        # The last epoch whose results the attached value has, as far as the loop has said.
        self._covered = start.epoch - 1
        self._histories: dict[int, WorkerHistory] = {}  # of the epochs from the next one that is not covered
        self._recorded: Remainder | None = None  # what is left of the current epoch, according to the last state
        self._has_warned = False

    def begin(self, tasks: EpochTasks) -> None:
        """Make an epoch the current one."""
        self.tasks, self.ended, self._recorded = tasks, False, None
        self._histories[tasks.epoch] = self._history()

    def left(self) -> Remainder:
        """What is left of the current epoch, or the next one: where a session goes on from the last state in it."""
        assert self.tasks is not None
        recorded = self._recorded or self._remainder((), NOTHING)
        return SessionState.of(self._dataset, self._choices, self._history(), recorded).next

    def reopen(self, start: Remainder) -> None:
        """Let the current epoch begin again with what is left of it."""
        self._start = start

    @property
    def attached(self) -> Any:
        """A copy of the value that travels with the state."""
        return None if self._pickled is None else unpickled(self._pickled)

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
        # At once: what is changed in place later belongs to another position.
        self._pickled, self._covered = None if value is None else pickled(value), epoch
        self._histories = {number: history for number, history in self._histories.items() if number > epoch}

    def state(self, counts: tuple[int, ...] = (), digest: SampleDigest = NOTHING) -> dict[str, Any]:
        """The state, as :meth:`dshuffle.Shuffler.state_dict` returns it."""
        reached, history = self._remainder(counts, digest), self._history()
        if self._pickled is None:
            if any(counts) and self._covered < reached.epoch:  # None is attached where the caller keeps the model
                self._warn(
                    "dshuffle: the state says that %d samples of epoch %d were trained on, and no model was attached. "
                    "A session that resumes does not train on them again. Attach the model of this moment "
                    "(shuffler.attach), or save it yourself",
                    sum(counts),
                    reached.epoch,
                )
        elif reached.epoch > self._covered:  # what the value does not have is trained on again
            if reached.epoch > self._covered + 2:
                self._warn(
                    "dshuffle: the state stays at the start of epoch %d, although epoch %d has begun, because the "
                    "attached value has the results before it alone. Attach the model after each epoch "
                    "(shuffler.attach)",
                    self._covered + 1,
                    reached.epoch,
                )
            first = self._covered + 1
            reached = self._start if first == self._start.epoch else Remainder(first, ())
            history = self._histories.get(first, history)
        if self.tasks is not None and reached.epoch == self.tasks.epoch:
            self._recorded = reached
        return SessionState.of(self._dataset, self._choices, history, reached, self._pickled).to_dict()

    def _warn(self, text: str, *values: object) -> None:
        """Warn once in a session."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(text, *values)

    def _remainder(self, counts: tuple[int, ...], digest: SampleDigest) -> Remainder:
        if self.tasks is None:
            return self._start
        if self.ended:
            return Remainder(self.tasks.epoch + 1, ())
        earlier = self._start if self._start.epoch == self.tasks.epoch else Remainder(self.tasks.epoch, ())
        return earlier.followed_by(counts, digest, self._history().weights) if any(counts) else earlier


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a session continues.

    Parameters
    ----------
    state
        The state of the earlier session.
    keywords
        Keywords of the shuffler that continues it.
    checkpoint
        The checkpoint that the state comes from, if the new session goes on to write it; otherwise None.
    """

    state: SessionState
    keywords: dict[str, Any]
    checkpoint: CheckpointFile | None = None


@contextlib.contextmanager
def resumption(
    dataset: Dataset, state: Mapping[str, Any] | str | os.PathLike[str], options: Mapping[str, Any]
) -> Iterator[Resumption]:
    """Read a state or a checkpoint, from which the body opens a session.

    No other session can write the checkpoint meanwhile. The session that the body opens releases it; an error in the
    body does so, too.
    """
    checkpoint = None
    try:
        if not isinstance(state, Mapping):
            options = {"checkpoint": state, **options}
            target = options["checkpoint"]
            if target is not None and checkpoint_place(target) == checkpoint_place(state):
                # Before it is read: a session that is still open may be about to write it.
                checkpoint = CheckpointFile(target, dataset, new=False)
            state = read_checkpoint(state, dataset)
        earlier = SessionState.from_dict(state, dataset)
        yield Resumption(earlier, earlier.keywords(dataset, options), checkpoint)
    except BaseException:
        if checkpoint is not None:
            checkpoint.release()
        raise
