"""The secret of a user's jobs, and connections whose ends show each other that they know it.

Dask unpickles what whoever connects sends. So the ends of a connection show each other that they know the secret before
Dask sees the connection: each sends random bytes, and a digest of the other's random bytes with the secret. What is
sent afterwards is not encrypted; TLS does that.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from typing import Any, NamedTuple

import dask
from distributed import Security
from distributed.comm.core import CommClosedError, FatalCommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import TCPBackend, TCPConnector, TCPListener
from tornado.iostream import IOStream

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.private_files import user_key

logger = logging.getLogger(__name__)

VARIABLE = "DSHUFFLE_SECRET"
"""Environment variable with a secret, for hosts that do not share a home directory."""

AUTO = "auto"
"""The secret is that of the environment variable, or a file in the user's home."""

LEAST_LENGTH = 16
"""Characters of a secret. Somebody who sees a digest on the network could try all short ones."""

PROTOCOL = "dshuffle"
"""Scheme of the addresses of connections with a secret."""

PROVE_WITHIN = 10.0
"""Seconds that a peer has to show that it knows the secret."""

GREETING = b"dshuffle secret 1"
NONCE_NBYTES = 32
CONNECTS, LISTENS = b"connects", b"listens"
"""The two ends. They are in the digests, so that an end cannot send back the digest that it has received."""


class OtherSecret(FatalCommClosedError):
    """The other end of a connection has another secret, or does not speak of one."""


def key_of(secret: str | None, *, one_host: bool) -> tuple[bytes | None, str]:
    """The key of a job's connections, and what it is, for the user. The key is None if anybody may connect."""
    if secret is None:
        return None, "any process that reaches it can run code here, because of secret=None"
    if not isinstance(secret, str):
        raise InvalidParameter.because("secret", "it is not text", f"Give {AUTO!r}, None, or text.")
    text, name = (os.environ.get(VARIABLE), VARIABLE) if secret == AUTO else (secret, "secret=")
    if text is not None:
        if len(text) < LEAST_LENGTH:
            hint = "This makes one: python -c 'import secrets; print(secrets.token_hex())'"
            raise InvalidParameter.because(name, f"it has fewer than {LEAST_LENGTH} characters", hint)
        return hmac.digest(text.encode(), b"dshuffle.spmd", "sha256"), f"connections need the secret of {name}"
    try:
        key = user_key(temporary=one_host)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user does not have a home
        if one_host:
            return None, f"any user of this host can run code here, because there is no secret ({error})"
        raise ClusterError(
            f"the ranks are on several hosts, and there is no secret for them, because {error}.\n"
            f"Set {VARIABLE} to the same {LEAST_LENGTH} or more random characters on all ranks, or give security=",
            transient=False,
        ) from error
    return hmac.digest(key, b"dshuffle.spmd", "sha256"), "connections need the secret in this user's cache folder"


class Protection(NamedTuple):
    """How connections are protected: the scheme of addresses, what Dask needs to know, and in words for the user."""

    protocol: str
    security: Security
    words: str
    is_open: bool = False


def protection_of(security: Security, secret: str | None, *, one_host: bool) -> Protection:
    """How the connections of a job are protected."""
    if security.require_encryption or dask.config.get("distributed.comm.default-scheme") == "tls":
        return Protection("tls", security, "connections use TLS")
    key, words = key_of(secret, one_host=one_host)
    if key is None:
        return Protection("tcp", security, words, is_open=True)
    return Protection(PROTOCOL, SecretSecurity(key), words)


class SecretSecurity(Security):
    """Dask's security without certificates, and with a key that both ends of a connection must have."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Arguments of :class:`_Connector`."""
        return {**super().get_connection_args(role), "key": self._key}

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Arguments of :class:`_Listener`."""
        return {**super().get_listen_args(role), "key": self._key}


async def prove(stream: IOStream, key: bytes, own: bytes, other: bytes) -> None:
    """Show the other end that this one has the key, and check that the other one has it."""
    nonce = secrets.token_bytes(NONCE_NBYTES)
    await stream.write(GREETING + nonce)
    greeting = await stream.read_bytes(len(GREETING) + NONCE_NBYTES)
    if not greeting.startswith(GREETING):
        raise OtherSecret("the other end does not speak of a secret")
    other_nonce = greeting[len(GREETING) :]
    await stream.write(hmac.digest(key, own + nonce + other_nonce, "sha256"))
    digest = await stream.read_bytes(hmac.new(key, digestmod="sha256").digest_size)
    if not hmac.compare_digest(digest, hmac.digest(key, other + other_nonce + nonce, "sha256")):
        raise OtherSecret("the other end has another secret")


class _Connector(TCPConnector):
    prefix = f"{PROTOCOL}://"

    async def connect(self, address: Any, deserialize: Any = True, **arguments: Any) -> Any:
        key = arguments.pop("key")
        comm = await super().connect(address, deserialize, **arguments)
        try:
            await prove(comm.stream, key, CONNECTS, LISTENS)
        except BaseException as error:
            comm.abort()
            if isinstance(error, OSError) and not isinstance(error, CommClosedError):
                raise CommClosedError(str(error)) from error  # Dask tries again
            raise
        return comm


class _Listener(TCPListener):
    prefix = f"{PROTOCOL}://"

    def __init__(self, *arguments: Any, key: bytes, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._key = key
        self._refused: set[str] = set()

    async def _prepare_stream(self, stream: IOStream, address: str) -> IOStream | None:
        try:
            await asyncio.wait_for(prove(stream, self._key, LISTENS, CONNECTS), PROVE_WITHIN)
        except OtherSecret:
            host = address.partition("://")[2].rpartition(":")[0]
            if host not in self._refused and len(self._refused) < 8:
                self._refused.add(host)
                logger.warning("dshuffle: a process on %s was refused: it does not have the secret of this job", host)
        except (OSError, TimeoutError):
            pass
        else:
            return stream
        stream.close()
        return None


class _Backend(TCPBackend):
    _connector_class: Any = _Connector
    _listener_class: Any = _Listener


backends[PROTOCOL] = _Backend()
