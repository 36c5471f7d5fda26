"""What the endpoints do when a sender cannot deliver, and when a run takes up an aborted one."""

from __future__ import annotations

import asyncio
from typing import Any

from dshuffle.exchange.mailboxes import MessageId

from .test_endpoints import PEERS, Fields, corrupted


def test_what_peers_cannot_deliver_is_read_from_the_store(new_cluster: Any) -> None:
    """A row that is corrupted where it is held, and a link that is broken for good."""
    cluster = new_cluster(senders=PEERS)

    async def carry(message: MessageId) -> Fields:
        if message.sender == 0:
            raise ConnectionResetError("cut off")
        reply = await cluster.wire(message)
        return corrupted(reply, cluster.rng) if message.sequence == 0 else reply

    async def scenario() -> None:
        cluster.carry = carry
        await cluster.exchange(2)
        bad = [message for message in cluster.messages() if message.sender == 0 or message.sequence == 0]
        assert cluster.reads == len(bad)
        assert {cluster.asked[message] for message in bad} == {3}
        flows = {who: peer.arriving[2] for who, peer in cluster.ranks.items()}
        rows = [flows[message.destination][message.sender].message(message.sequence) for message in bad]
        recovered = sum(peer.receiver.meter.recovered_rows for peer in cluster.ranks.values())
        assert recovered == sum(last - first for first, last in rows)
        cluster.commit()

    cluster.play(scenario)


def test_a_run_that_resumes_another_requests_only_what_is_missing(new_cluster: Any) -> None:
    cluster = new_cluster(senders=PEERS, n_samples=120)
    arrived: set[MessageId] = set()

    async def half(message: MessageId) -> Fields:
        if message.sequence % 2:
            return {"status": "refused", "reason": "not now", "again": False}
        reply = await cluster.wire(message)
        arrived.add(message)
        return reply

    async def scenario() -> None:
        cluster.carry = half
        await cluster.exchange(2)
        while not any(peer.receiver._arrived for peer in cluster.ranks.values()):
            await asyncio.sleep(0)
        await cluster.abort()
        cluster.carry = cluster.wire
        cluster.asked.clear()
        await cluster.exchange(3, resumed=True)
        again = {message._replace(run_id=2) for message in cluster.asked}
        assert arrived
        kept = {message for message in arrived if message not in again}
        assert kept
        assert {message._replace(run_id=2) for message in cluster.messages()} == kept | again
        cluster.commit()

    cluster.play(scenario)
