"""Objects whose states travel with the position of a loader: a model, an optimizer, a schedule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

from dshuffle.errors import CheckpointError, InvalidParameter


class AttachedObjects:
    """Objects with ``state_dict`` and ``load_state_dict``, by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    @property
    def names(self) -> set[str]:
        """Names of the objects."""
        return set(self._objects)

    def attach(self, objects: Mapping[str, Any], states: Mapping[str, Any] | None) -> None:
        """Add objects, and load their states if there are any."""
        for name, value in objects.items():
            if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
                raise InvalidParameter.of(name, value, "an object with state_dict and load_state_dict")
            if states is not None and name not in states:
                raise CheckpointError(
                    f"the state that this job continues has no object {name!r}; it has {sorted(states)}. Attach "
                    "objects under the same names as before"
                )
        for name, value in objects.items():
            if states is not None:
                value.load_state_dict(states[name])
            self._objects[name] = value

    def states(self) -> dict[str, Any]:
        """Copies of the states, with tensors in the memory of the host."""
        return {name: on_host(value.state_dict()) for name, value in self._objects.items()}


def on_host(value: Any) -> Any:
    """Copy a state, with tensors in the memory of the host."""
    if callable(getattr(value, "detach", None)) and callable(getattr(value, "cpu", None)):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the attributes that PyTorch gives to states of modules
        copied.update({key: on_host(item) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return copy.deepcopy(value)


def pickled(states: Any) -> bytes:
    """States as bytes for the other ranks; empty for None."""
    return b"" if states is None else pickle.dumps(states)


def unpickled(text: bytes) -> Any:
    """The states in :func:`pickled` bytes."""
    return pickle.loads(text) if text else None
