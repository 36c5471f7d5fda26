"""Hide passwords, tokens and signatures in texts that people see: errors, representations, logs and reports."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"

_NAME = re.compile(r"(?i)secret|token|passw|credential|signature|(api|access)[_-]?key")
_USER = re.compile(r"://[^/@\s'\"]+@")
# Parameters of URLs that grant access: signed URLs of the large clouds, and what other services call theirs.
_PARAMETER = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:sig|signature|token|secret|password|passwd|credential|api[_-]?key|access[_-]?key)[\w.-]*"
    r"|key|pwd|auth)=)[^&;#\s'\"]+"
)
_SHORTEST = 4


def hide_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace user names and passwords in URLs, signatures and tokens in query parameters, and the given values."""
    text = _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(f"://{HIDDEN}@", text))
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text


def option_values(options: object) -> tuple[str, ...]:
    """All strings in storage options, at any depth."""
    if isinstance(options, str):
        return (options,)
    if isinstance(options, bytes):
        return (options.decode(errors="replace"),)
    items = options.values() if isinstance(options, Mapping) else options
    return tuple(text for item in items for text in option_values(item)) if isinstance(items, Iterable) else ()


class _ShortRepr(reprlib.Repr):
    """Values as messages show them: on one line and shortened. A large object is shown by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20
        self.maxstring = self.maxother = 300

    def repr_str(self, x: str, level: int) -> str:
        """Show a text without its secrets, of which shortening might leave a part that looks like none."""
        return super().repr_str(hide_secrets(x), level)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Show a mapping without the values of names that sound secret."""
        return super().repr_dict(
            {name: HIDDEN if _NAME.search(str(name)) else value for name, value in x.items()}, level
        )

    def repr_instance(self, x: object, level: int) -> str:
        """Show an object that is neither a number, text nor a container."""
        text = hide_secrets(repr(x))
        return text if "\n" not in text and len(text) <= self.maxother else f"<{type(x).__module__}.{type(x).__name__}>"


def short_repr(value: object) -> str:
    """Return a value as messages show it."""
    return _ShortRepr().repr(value)
