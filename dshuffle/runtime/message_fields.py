"""How frozen messages travel between processes: as plain fields by name, which are checked where they arrive.

Nothing is pickled. What arrives is either a whole message of the type that is expected, or an error. msgspec reads the
types of the fields from their annotations. It takes a tenth of the time of the same checks in Python: the scheduler
reads two messages of every worker in an epoch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dshuffle.errors import ClusterError
from dshuffle.planning.sample_digest import SAME_BUILD

T = TypeVar("T")


def to_fields(message: Any) -> dict[str, Any]:
    """The fields of a message by name.

    Examples
    --------
    >>> from dshuffle.planning.sample_digest import SampleDigest
    >>> to_fields(SampleDigest(1, 2, 3, 4))
    {'count': 1, 'total': 2, 'first': 3, 'second': 4}
    """
    fields: dict[str, Any] = msgspec.to_builtins(message)
    return fields


def from_fields(kind: type[T], fields: object, sender: str) -> T:
    """The message of a type that :func:`to_fields` wrote.

    Parameters
    ----------
    kind
        Type of the message.
    fields
        What has arrived.
    sender
        From whom it comes, for the error.

    Raises
    ------
    ClusterError
        If it is not such a message, or has fields that are unknown here.
    """
    try:
        message = msgspec.convert(fields, kind)
        # Structs of messages of rows check it themselves, as there are so many; dataclasses cannot.
        if not (isinstance(message, msgspec.Struct) and message.__struct_config__.forbid_unknown_fields):
            _check_names(fields, msgspec.to_builtins(message))
    except msgspec.ValidationError as error:
        reason = f"{sender} sent what is not a message of the type {kind.__name__} ({error}). {SAME_BUILD}"
        raise ClusterError(reason, transient=False) from error
    return message


def _check_names(fields: Any, known: Any) -> None:
    """Refuse fields that are not among those that the message of them has."""
    if isinstance(known, dict):
        for name, value in fields.items():
            if name not in known:
                raise msgspec.ValidationError(f"Object contains unknown field `{name}`")
            _check_names(value, known[name])
    elif isinstance(known, (list, tuple)):
        for value, part in zip(fields, known, strict=True):
            _check_names(value, part)
