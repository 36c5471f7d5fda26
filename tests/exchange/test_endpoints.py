"""Senders and receivers: what arrives is byte-exact, and what cannot arrive fails a run with its reason."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.exchange.comms import Refusal
from dshuffle.exchange.mailboxes import MessageId, flows_of_samples
from dshuffle.exchange.transports import leaving

Fields = dict[str, Any]
SERVER, STORE = -1, -2
PEERS = (0, 1, 2)
NO_STORE = " (attempt 3), and the rows could not be read from the store: DatasetError: no store"
REASONS = [  # what the faulty network does, three times to one message
    "OSError: request lost" + NO_STORE,
    "TimeoutError: reply lost" + NO_STORE,
    "OSError: acknowledgement lost" + NO_STORE,
    "arrived corrupted" + NO_STORE,
    "a reply that cannot be read: Expected `object`, got `null`" + NO_STORE,
]


def corrupted(reply: Fields, rng: random.Random) -> Fields:
    rows = reply["rows"].copy()  # as it is on the wire, not in the sender's buffer
    rows[rng.randrange(len(rows)), rng.randrange(rows.shape[1])] ^= 1 << rng.randrange(8)
    return {**reply, "rows": rows}


# -- what arrives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(8))
def test_partitions_are_byte_exact_and_nothing_is_sent_twice(new_cluster: Any, seed: int, over: str) -> None:
    rng = random.Random(seed)
    # One attempt, and replies that wait before they are read: a buffer used again too early would fail the run.
    n_ranks, window, server_at = rng.randint(1, 4), rng.randint(1, 3), rng.choice([SERVER, 0])
    cluster = new_cluster(seed, n_ranks=n_ranks, window=window, attempts=1, server_at=server_at)

    async def slowly(message: MessageId) -> Fields:
        await cluster.pause()
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        return reply

    async def scenario() -> None:
        cluster.carry = slowly
        for run_id in range(2, 6):
            cluster.asked.clear()
            cluster.acknowledged.clear()
            assert await cluster.exchange(run_id) == dict.fromkeys(cluster.ranks)
            assert cluster.asked == cluster.acknowledged == Counter(cluster.messages())
            sent = sum(peer.sender.meter.sent_bytes for peer in cluster.participants.values())
            received = sum(peer.receiver.meter.received_bytes for peer in cluster.ranks.values())
            flows = [(who, to, ids) for who in cluster.participants for to, ids in cluster.sends[who].items()]
            n_sent = sum(len(ids) for who, to, ids in flows if (who, to) != (SERVER, server_at))
            assert sent == received == n_sent * (cluster.truth.rows.shape[1] + 4)
            cluster.commit()
            n_samples, ranks = len(cluster.truth.rows), sorted(cluster.ranks)
            cluster.plan(np.array([rng.choice(ranks) for _ in range(n_samples)]), None)

    cluster.play(scenario)


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(15))
def test_under_faults_a_run_is_right_or_fails_with_its_reason(new_cluster: Any, seed: int, over: str) -> None:
    cluster, rng = new_cluster(seed), random.Random(seed)
    chance = rng.choice([0.02, 0.1, 0.3])
    carry_acknowledgement = cluster.carry_acknowledgement

    async def faulty(message: MessageId) -> Fields:
        await cluster.pause()
        fault = rng.choice(["request lost", "reply lost", "corrupted", "unknown"]) if rng.random() < chance else None
        if fault == "request lost":
            raise OSError(fault)
        if fault == "unknown":
            return None  # type: ignore[return-value]
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        if fault == "reply lost":
            raise TimeoutError(fault)
        return corrupted(reply, rng) if fault and reply["status"] == "OK" else reply

    async def acknowledge(message: MessageId) -> None:
        if rng.random() < chance / 4:
            raise OSError("acknowledgement lost")
        await carry_acknowledgement(message)

    async def scenario() -> None:
        cluster.carry = faulty
        cluster.carry_acknowledgement = acknowledge
        for run_id in range(2, 8):
            votes = await cluster.exchange(run_id)
            failures = [reason for reason in votes.values() if reason is not None]
            if not failures:
                cluster.commit()
                return
            assert all(any(why in reason for why in REASONS) for reason in failures), failures
            assert all(reason.startswith(f"run {run_id}, ") for reason in failures)
            await cluster.abort()
        cluster.carry, cluster.carry_acknowledgement = cluster.wire, carry_acknowledgement
        assert await cluster.exchange(run_id + 1) == dict.fromkeys(cluster.ranks)
        cluster.commit()

    cluster.play(scenario)


def test_a_corrupted_message_is_fetched_again_and_acknowledged_once(new_cluster: Any) -> None:
    cluster = new_cluster(senders=PEERS)

    async def first_corrupted(message: MessageId) -> Fields:
        reply = await cluster.wire(message)
        return corrupted(reply, cluster.rng) if cluster.asked[message] == 1 else reply

    async def late(message: MessageId) -> None:
        # Another request of the same receiver may overtake it: it must not name rows that are still to be packed.
        asyncio.get_running_loop().call_later(0.01, cluster.participants[message.sender].sender.acknowledged, message)
        cluster.acknowledged[message] += 1

    async def scenario() -> None:
        cluster.carry, cluster.carry_acknowledgement = first_corrupted, late
        await cluster.exchange(2)
        assert cluster.asked == Counter({message: 2 for message in cluster.messages()})
        assert cluster.acknowledged == Counter(cluster.messages())
        cluster.commit()

    cluster.play(scenario)


# -- what fails ----------------------------------------------------------------------------------------------------


def failure(cluster: Any, carry: Callable[[MessageId], Awaitable[Fields]]) -> str:
    """Why a run over such a network fails if the store cannot help."""

    def no_store(*_: object) -> None:
        raise DatasetError("no store")

    async def scenario() -> str:
        cluster.carry, cluster.read_store = carry, no_store
        votes = await cluster.exchange(2)
        await cluster.abort()
        del cluster.read_store
        # What made it fail is gone: the next run is committed.
        cluster.carry = cluster.wire
        await cluster.exchange(3)
        cluster.commit()
        return next(reason for reason in votes.values() if reason is not None)

    return str(cluster.play(scenario))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "rank {} sent a reply that cannot be read: Expected `object`, got `null`" + NO_STORE),
        ({}, "rank {} sent a reply that cannot be read: Object missing required field `status`" + NO_STORE),
        ({"status": "refused", "reason": "closed", "again": False}, "closed"),
        ({"status": "refused", "reason": "busy", "again": True}, "busy" + NO_STORE),
        ({"status": "refused", "again": True}, "rank {} sent a reply that cannot be read: Object missing required"),
        (
            {"status": "refused", "reason": "closed", "again": "no"},
            "ExchangeError: rank {} sent a reply that cannot be read: Expected `bool`, got `str` - at `$.again`",
        ),
    ],
)
def test_an_unusable_reply_is_the_reason(new_cluster: Any, reply: Fields, words: str) -> None:
    async def carry(message: MessageId) -> Fields:
        return reply

    reason = failure(new_cluster(senders=PEERS), carry)
    assert any(words.format(sender) in reason for sender in PEERS), reason


@pytest.mark.parametrize(
    ("error", "often"),
    [(ConnectionResetError("cut off"), NO_STORE), (RuntimeError("a bug"), ""), (MemoryError("full"), "")],
)
def test_an_error_is_the_reason(new_cluster: Any, error: Exception, often: str) -> None:
    async def carry(message: MessageId) -> Fields:
        raise error

    reason = failure(new_cluster(senders=PEERS), carry)
    assert reason.endswith(f"{type(error).__name__}: {error}{often}")


def test_a_reply_that_never_comes_times_out(new_cluster: Any) -> None:
    async def carry(message: MessageId) -> Fields:
        return await asyncio.get_running_loop().create_future()

    reason = failure(new_cluster(senders=PEERS, timeout=0.2), carry)
    assert "TimeoutError: no reply within 0.2 s" + NO_STORE in reason


def test_a_sender_that_lacks_a_row_is_not_asked_again(new_cluster: Any) -> None:
    cluster = new_cluster(senders=PEERS)

    async def scenario() -> None:
        sender, flows = next((who, flows) for who, flows in cluster.sends.items() if flows)
        rank = next(iter(flows))
        missing = next(sample for sample in cluster.next_held[rank] if sample not in cluster.ranks[sender].held)
        flows[rank] = np.array([missing])
        votes = await cluster.exchange(2)
        assert f"ExchangeError: sample {missing} is not in this cache partition" in (votes[rank] or "")
        assert "attempt" not in (votes[rank] or "")
        assert MessageId(2, sender, rank, 0) not in cluster.ranks[sender].outbox.in_flight

    cluster.play(scenario)


# -- what waits ----------------------------------------------------------------------------------------------------


def test_requests_before_the_run_wait_for_it_and_after_it_are_refused(new_cluster: Any) -> None:
    cluster = new_cluster()

    async def scenario() -> None:
        early = MessageId(3, SERVER, 0, 10**6)
        sender = cluster.participants[SERVER].sender
        request = asyncio.ensure_future(sender.serve(early))
        await cluster.exchange(2)
        cluster.commit()
        assert not request.done()
        source = asyncio.get_running_loop().create_future()
        source.set_result(leaving(cluster.truth.pack, np.arange(5)))
        sender.begin(3, flows_of_samples({0: np.arange(5)}, at_most=3)[1], source)
        assert await request == Refusal("this run has 2 messages for destination 0")
        for run_id in (1, 2):
            reply = await sender.serve(MessageId(run_id, SERVER, 0, 0))
            assert reply == Refusal(f"stale: the server is past run {run_id}")

    cluster.play(scenario)


# -- the store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [CorruptChunk("chunk 7 of array 'x'"), DatasetError("it is gone"), ValueError("a bug")], ids=repr
)
def test_what_the_store_cannot_give_is_not_asked_for_again(new_cluster: Any, error: Exception) -> None:
    cluster = new_cluster(senders=(STORE, *PEERS))

    def fail(*_: object) -> None:
        cluster.reads += 1
        raise error

    async def scenario() -> None:
        cluster.read_store = fail
        votes = await cluster.exchange(2)
        await cluster.abort()
        reasons = [reason for reason in votes.values() if reason]
        assert reasons
        assert all(reason.endswith(f"{type(error).__name__}: {error}") for reason in reasons)
        assert cluster.reads <= len(cluster.ranks)
        del cluster.read_store
        await cluster.exchange(3)
        cluster.commit()

    cluster.play(scenario)


def test_a_store_that_stumbles_is_read_again(new_cluster: Any) -> None:
    cluster = new_cluster(senders=(STORE,))
    cluster.store_rows = 1000  # so that each reader reads once
    read_store = cluster.read_store

    def stumble(reader: Any, sample_ids: np.ndarray, slots: np.ndarray) -> None:
        reader.cache.rows[slots[0]] = 0
        if cluster.reads < 2:
            cluster.reads += 1
            raise ConnectionResetError("by peer")
        read_store(reader, sample_ids, slots)

    async def scenario() -> None:
        cluster.read_store = stumble
        await cluster.exchange(2)
        cluster.commit()

    cluster.play(scenario)
    assert cluster.reads == 2 + 3
