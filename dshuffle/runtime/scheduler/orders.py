"""The messages of orders to participants, and what the answers are."""

from __future__ import annotations

from typing import Any

from distributed.protocol.serialize import ToPickle

from dshuffle.runtime.message_fields import to_fields
from dshuffle.runtime.messages import Answer, CommitReply, MemberState
from dshuffle.runtime.scheduler.deliveries import EpochDeliveries
from dshuffle.runtime.scheduler.machine.instructions import Order
from dshuffle.runtime.scheduler.machine.session_machine import SessionMachine
from dshuffle.runtime.scheduler.participants import Participants

ANSWERS: dict[str, type[Answer]] = {"status": MemberState, "commit": CommitReply}
"""Orders whose answers say something, and what. To all other orders, participants only answer that they obey."""


def message_of(
    order: Order,
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
    epoch = machine.epoch if machine.epoch >= machine.first_epoch else None
    match order.name:
        case "open":
            spec = participants.spec_of(order.participant, None)
            return {**_opening(order, epoch), "spec": ToPickle(spec), "restore": False}
        case "restore":
            spec = participants.spec_of(order.participant, epoch)
            digest = machine.digests.get(order.participant)
            fields = None if digest is None else to_fields(digest)
            return {**_opening(order, epoch), "spec": ToPickle(spec), "restore": True, "drawn": fields}
        case "members":
            return {"addresses": dict(participants.addresses), "number": order.turn}
        case "status":
            return {}
        case "begin":
            run = machine.run
            if run is None or run.run_id != order.run_id:
                return None
            delivery = deliveries.of_run(run)
            return {"run_id": order.run_id, "epoch": run.epoch, "delivery": delivery, "rate": rate}
    return {"run_id": order.run_id}


def _opening(order: Order, epoch: int | None) -> dict[str, Any]:
    return {"number": order.turn, "last_run": order.run_id, "epoch": epoch}


def answer_type(order: Order) -> type[Answer]:
    """The type of the answer to an order."""
    return ANSWERS.get(order.name, type(None))
