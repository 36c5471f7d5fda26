"""What a store's error means: whether to ask again, and how to say it without giving a secret away."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

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
# obstore has one class for all that is neither "not found" nor "not allowed", so its words must tell.
_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT_WORDS = ("error sending request", "body error", "kind: Timeout", "kind: Interrupted", "kind: Connect")
# Where obstore looks for a role of the machine, when it knows of no credentials.
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
    (("AccessDenied", "status code: 403"), "The credentials have no permission for this."),
    (("kind: Timeout", "TimedOut"), "It did not answer in time."),
    (("ConnectionRefused",), "Nothing listens at the endpoint."),
    (("redirect without LOCATION",), "The bucket is in another region; name it with region=."),
    (
        ("non-partial response", "Requested "),
        "The server answers range requests wrongly, so its data cannot be trusted.",
    ),
)


def is_transient(exc: BaseException) -> bool:
    """Whether the same request may succeed a little later: time-outs, resets, throttling, a server's errors.

    Examples
    --------
    >>> is_transient(ConnectionResetError()), is_transient(PermissionError())
    (True, False)
    """
    if isinstance(exc, TimeoutError | ConnectionError):
        return True
    for name in ("status", "code"):  # aiohttp and the libraries on it
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


def explained(exc: BaseException, secrets: Iterable[str] = ()) -> str:
    """One line that says what happened and, where it is known, what to do; none of the secrets is in it.

    Parameters
    ----------
    exc
        What the store raised.
    secrets
        Values that must not appear.

    Examples
    --------
    >>> explained(OSError("<Error><Code>SlowDown</Code><Message>Wait</Message><Key>hunter2</Key></Error>"))
    'OSError: SlowDown: Wait'
    """
    full = str(exc)
    text = full.partition("\n\nDebug source:")[0]
    body = re.search(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", text, re.DOTALL)
    if body:
        # The rest of S3's answer repeats what was signed.
        start = re.split(r"<\?xml|<Error", text, maxsplit=1)[0].rstrip(": ")
        text = ": ".join(part for part in (start, body[1], body[2]) if part)
    said = f"{type(exc).__name__}: {' '.join(text.split())}" if text.strip() else type(exc).__name__
    if type(exc).__module__.startswith("obstore"):
        said += next((f". {hint}" for words, hint in _HINTS if any(word in full for word in words)), "")
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= 4:  # a shorter one is none, and would riddle the words
            said = said.replace(secret, "***")
    return said
