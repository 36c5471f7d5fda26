"""What a message is called."""

from __future__ import annotations

import pickle

from dshuffle.exchange.messages import MessageId


def test_a_message_id_says_where_it_goes_and_travels() -> None:
    message = MessageId(3, -1, 2, 7)
    assert str(message) == "run 3, the server to rank 2, message 7"
    assert pickle.loads(pickle.dumps(message)) == message
    assert len({message, MessageId(3, -1, 2, 7), MessageId(4, -1, 2, 7)}) == 2
