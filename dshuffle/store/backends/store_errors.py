"""What errors of stores mean: whether the same request may succeed later, was refused, and what is said of it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

from dshuffle.errors import DatasetError
from dshuffle.redaction import hide_secrets

SAME_ANSWER = "A store that may not be listed answers in the same way if the object does not exist"
"""What else a refusal may mean."""

_REFUSED = (401, 403)
_CODE = re.compile(r"<Code>(.*?)</Code>")


class AccessRefused(DatasetError):
    """The store refuses access to an object, or does not say that the object does not exist."""


def is_refusal(error: BaseException) -> bool:
    """Whether a store has refused access to an object, and not a request with wrong credentials.

    Examples
    --------
    >>> is_refusal(PermissionError("Access Denied")), is_refusal(FileNotFoundError())
    (True, False)
    """
    code = _CODE.search(str(error))
    if code:
        return code[1] == "AccessDenied"
    if isinstance(error, PermissionError):
        return True
    if type(error).__module__.startswith("obstore"):
        return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    return any(getattr(error, name, None) in _REFUSED for name in ("status", "code"))


_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_ERRNO = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
# obstore has one class for all errors except "not found" and "not allowed", so the message must be parsed.
_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT_WORDS = ("error sending request", "body error", "kind: Timeout", "kind: Interrupted", "kind: Connect")
# URL path where obstore looks for the role of the machine if it does not have credentials.
_METADATA_SERVICE = "/latest/api/token"

_HINTS = (
    (("RequestTimeTooSkewed",), "The clock of this machine is wrong; set it (NTP)."),
    (
        (_METADATA_SERVICE, "/latest/meta-data"),
        "No credentials were found: give storage_options access_key_id and secret_access_key, or set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (anon=True for public data).",
    ),
    (("NoSuchBucket",), "The bucket does not exist at this endpoint."),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch"), "The credentials are wrong for this endpoint."),
    (("kind: Timeout", "TimedOut"), "The server did not answer in time."),
    (("ConnectionRefused",), "Nothing is listening at the endpoint."),
    (("redirect without LOCATION",), "The bucket is in another region; set region=."),
    (
        ("non-partial response", "Requested "),
        "The server answers range requests wrongly, so its data cannot be trusted.",
    ),
)


def is_transient(exc: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, resets, throttling and server errors.

    Examples
    --------
    >>> is_transient(ConnectionResetError()), is_transient(PermissionError())
    (True, False)
    """
    if isinstance(exc, TimeoutError | ConnectionError):
        return True
    for name in ("status", "code"):  # aiohttp and libraries that use it
        status = getattr(exc, name, None)
        if isinstance(status, int):
            return status in _TRANSIENT_STATUS
    if isinstance(exc, OSError) and exc.errno is not None:
        return exc.errno in _TRANSIENT_ERRNO
    module = type(exc).__module__
    if module.startswith("aiohttp"):
        return type(exc).__name__ in ("ServerDisconnectedError", "ClientPayloadError", "ClientOSError")
    if module.startswith("obstore") and type(exc).__name__ == "GenericError":
        text = str(exc)
        if _METADATA_SERVICE in text:
            return False
        status_found = _STATUS.search(text)
        if status_found:
            return int(status_found[1]) in _TRANSIENT_STATUS
        return "builder error" not in text and any(words in text for words in _TRANSIENT_WORDS)
    return False


def explained(exc: BaseException, secrets: Iterable[str] = (), access: str = "") -> str:
    """Describe an error in one line, without secrets, and add advice where there is any.

    Parameters
    ----------
    exc
        Exception raised by the store.
    secrets
        Values that must not appear in the text.
    access
        How access was tried, and advice, for an error that says that it was refused.

    Examples
    --------
    >>> explained(OSError("<Error><Code>SlowDown</Code><Message>Wait</Message><Key>hunter2</Key></Error>"))
    'OSError: SlowDown: Wait'
    """
    full = str(exc)
    text = full.partition("\n\nDebug source:")[0]
    body = re.search(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", text, re.DOTALL)
    if body:
        # The rest of S3's answer repeats the signed request.
        start = re.split(r"<\?xml|<Error", text, maxsplit=1)[0].rstrip(": ")
        text = ": ".join(part for part in (start, body[1], body[2]) if part)
    message = f"{type(exc).__name__}: {' '.join(text.split())}" if text.strip() else type(exc).__name__
    if type(exc).__module__.startswith("obstore"):
        message += next((f". {hint}" for words, hint in _HINTS if any(word in full for word in words)), "")
    if access and is_refusal(exc):
        message += f". {access}"
    return hide_secrets(message, secrets)
