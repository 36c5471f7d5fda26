"""The attribute with which dshuffle marks groups that it writes, so that unfinished ones are recognised.

A group from elsewhere may have an attribute of the same name. So the mark is recognised by all of its fields.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

ATTRIBUTE = "dshuffle"
"""Name of the group attribute."""

_VERSION = 1
_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Mark:
    """What dshuffle says about a group that it writes.

    Parameters
    ----------
    complete
        Whether all of the group has been written.
    uuid
        Random name of the dataset, 32 hexadecimal digits. None for unfinished datasets, and for shardings.
    """

    complete: bool
    uuid: str | None = None

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self | None:
        """The mark among the attributes of a group; None if dshuffle did not write the group.

        Examples
        --------
        >>> Mark.of({"dshuffle": {"version": 1, "complete": False}})
        Mark(complete=False, uuid=None)
        >>> Mark.of({"dshuffle": {"note": "somebody else's"}}) is None
        True
        """
        fields = attributes.get(ATTRIBUTE)
        if not isinstance(fields, Mapping) or fields.keys() - {"uuid"} != {"version", "complete"}:
            return None
        version, complete, name = fields["version"], fields["complete"], fields.get("uuid")
        if type(version) is not int or version < 1 or type(complete) is not bool:
            return None
        if name is not None and not (complete and isinstance(name, str) and _UUID.fullmatch(name)):
            return None
        return cls(complete, name)

    @classmethod
    def unfinished(cls) -> Self:
        """The mark of a group that is being written."""
        return cls(complete=False)

    @classmethod
    def of_new_dataset(cls) -> Self:
        """The mark of a complete dataset, with a new name."""
        return cls(complete=True, uuid=uuid.uuid4().hex)

    def attributes(self) -> dict[str, Any]:
        """The group attribute."""
        fields: dict[str, Any] = {"version": _VERSION, "complete": self.complete}
        return {ATTRIBUTE: fields if self.uuid is None else {**fields, "uuid": self.uuid}}
