"""The messages of the orders that a session machine gives, and the types of the answers."""

from __future__ import annotations

from typing import Any

from distributed.protocol.serialize import to_serialize

from dshuffle.runtime.message_fields import to_fields
from dshuffle.runtime.messages import Answer, CommitReply, MemberState
from dshuffle.runtime.orders import AbortOrder, BeginOrder, CommitOrder, MembersOrder, OpenOrder, SessionOrder, Together
from dshuffle.runtime.scheduler.deliveries import EpochDeliveries
from dshuffle.runtime.scheduler.machine.instructions import PhaseOrder
from dshuffle.runtime.scheduler.machine.session_machine import SessionMachine
from dshuffle.runtime.scheduler.participants import Participants

ANSWERS: dict[str, type[Answer]] = {"status": MemberState, "commit": CommitReply}
"""Orders whose answers say something, and what. To all other orders, participants only answer that they obey."""


def answer_type(order: PhaseOrder) -> type[Answer]:
    """The type of the answer to an order."""
    return ANSWERS.get(order.name, type(None))


def message_of(
    order: PhaseOrder,
    machine: SessionMachine,
    participants: Participants,
    deliveries: EpochDeliveries,
    rate: float | None,
) -> dict[str, Any] | None:
    """The message of an order; None if its run has ended.

    Parameters
    ----------
    order
        The order.
    machine
        The machine that gives it.
    participants
        Where the participants are.
    deliveries
        The delivery of each epoch.
    rate
        Rate of the workers' links in bytes per second, as far as it is known.
    """
    participant, run_id = order.participant, order.run_id
    session_id = participants.session_id(participant)
    match order.name:
        case "open" | "restore":
            restore = order.name == "restore"
            epoch = machine.epoch if machine.epoch >= machine.first_epoch else None
            digest = machine.digests.get(participant) if restore else None
            together = participants.together(machine.newcomers - machine.kept) if restore else Together()
            message = OpenOrder(
                number=order.turn,
                last_run=run_id,
                restore=restore,
                epoch=epoch,
                digest=digest,
                together=together,
            )
            spec = participants.packed_spec(participant, epoch if restore else None)
            return {**to_fields(message), "spec": to_serialize(spec)}  # as a frame, which is not copied
        case "members":
            return to_fields(MembersOrder(addresses=participants.moved, number=order.turn))
        case "begin":
            run = machine.run
            if run is None or run.run_id != run_id:
                return None
            delivery = deliveries.of_run(run)
            return to_fields(BeginOrder(run_id=run_id, epoch=run.epoch, delivery=delivery, rate=rate))
        case "commit":
            return to_fields(CommitOrder(session_id=session_id, run_id=run_id))
        case "abort":
            return to_fields(AbortOrder(run_id=run_id))
        case "status":
            return to_fields(SessionOrder(session_id=session_id))
    raise AssertionError(order.name)
