"""Look at what a session does at this moment."""

from __future__ import annotations

from dshuffle.planning import SERVER, name_of
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.snapshot import Participant, SessionSnapshot, figures_of
from dshuffle.slow_rank import slow_rank_in_words


def snapshot_of(session_id: str, coordinator: Coordinator) -> SessionSnapshot:
    """What the coordinator of a session knows."""
    spec, machine = coordinator.members.spec, coordinator.machine

    def state(participant: int) -> str:
        if participant in machine.unsettled:
            return "lost"
        return "exchanging" if machine.owes_rows(participant) else "ready"

    # The ranks by number, then the server.
    addresses = sorted(coordinator.addresses.items(), key=lambda item: (item[0] == SERVER, item[0]))
    epochs = figures_of(tuple(coordinator.log.exchanges))
    return SessionSnapshot(
        session_id=session_id,
        way=spec.shuffle.choices.label,
        n_samples=spec.shuffle.n_samples,
        row_nbytes=spec.dataset.layout.nbytes,
        epoch=machine.epoch if machine.epoch >= machine.first_epoch else None,
        phase=machine.phase.name.lower(),
        waiting_for=coordinator.waiting_for(),
        participants=tuple(
            Participant(
                name=name_of(participant),
                address=address,
                state=state(participant),
                held=coordinator.log.n_held.get(participant),
            )
            for participant, address in addresses
        ),
        epochs=epochs,
        links=coordinator.log.links,
        slow_rank=slow_rank_in_words([each.rank_training_seconds for each in epochs if each.rank_training_seconds]),
    )
