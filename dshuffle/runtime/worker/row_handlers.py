"""Handlers of messages of rows. They are called so often that their replies have a form of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dshuffle.exchange.comms import sent
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.replies import Refusal, to_fields
from dshuffle.exchange.shared_memory import may_share
from dshuffle.runtime.message_fields import from_fields
from dshuffle.runtime.worker.sessions import WorkerSessions


class Acknowledged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that have arrived."""

    session_id: str
    acknowledged: list[MessageId]


class Request(Acknowledged, frozen=True, forbid_unknown_fields=True):
    """A request for a message, with acknowledgements of earlier ones.

    Parameters
    ----------
    message
        The message.
    host
        Name of the receiver's host, if it can map memory of this one. Otherwise empty.
    """

    message: MessageId
    host: str


def row_handlers(sessions: Callable[[], WorkerSessions]) -> dict[str, Callable[..., Any]]:
    """The handlers by name; ``sessions`` returns the sessions of this worker."""

    def acknowledge_all(of: WorkerSessions, fields: Acknowledged) -> None:
        session = of.get(fields.session_id)
        if session is not None:
            for message in fields.acknowledged:
                session.acknowledge(message)

    async def fetch(**message: Any) -> dict[str, Any]:
        request, opened = from_fields(Request, message, "another worker"), sessions()
        acknowledge_all(opened, request)
        session = opened.get(request.session_id)
        if session is None:
            return to_fields(Refusal("the session is not open on this worker"))
        return await sent(opened.shared.worker, await session.serve(request.message, shared=may_share(request.host)))

    async def acknowledge(**message: Any) -> None:
        acknowledge_all(sessions(), from_fields(Acknowledged, message, "another worker"))

    return {"dshuffle_fetch": fetch, "dshuffle_acknowledge": acknowledge}
