"""Errors: whether another attempt can help, between processes and in the documentation."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from dshuffle import errors
from dshuffle.errors import DShuffleError, InvalidParameter, reasons_of

DOCS = Path(__file__).parents[1] / "docs"

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DShuffleError)]

TRANSIENT = {"ExchangeError", "ChecksumMismatch", "ClusterError", "WorkerLost", "PeerFailed"}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_says_whether_another_attempt_can_help(kind):
    assert kind("a reason").transient is (kind.__name__ in TRANSIENT)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if not issubclass(kind, MemoryError)])
@pytest.mark.parametrize("transient", [True, False])
def test_what_an_error_says_travels_with_it(kind, transient):
    error = pickle.loads(pickle.dumps(kind("a reason", transient=transient)))
    assert (type(error), str(error), error.transient) == (kind, "a reason", transient)
    named = error.raised_by("rank 1")
    assert (type(named), str(named), named.transient) == (kind, "rank 1: a reason", transient)


def test_a_hint_travels_with_its_error_and_hides_secrets():
    error = InvalidParameter.of("url", "x", "another", "Give s3://key:secret@host/bucket.")
    assert str(error).endswith(f". {error.hint}")
    assert pickle.loads(pickle.dumps(error)).hint == "Give s3://***@host/bucket."


def test_the_documentation_lists_these_classes():
    text = (DOCS / "errors.md").read_text()
    [listed] = re.findall(r"^By default, another attempt can help after (.*?)\.$", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == TRANSIENT - {"ChecksumMismatch"}


def test_every_error_that_led_to_another_is_visited_once():
    """`raise error from error.__cause__` and the like make circles."""
    first, second, third = OSError("first"), ValueError("second"), RuntimeError("third")
    third.__cause__, third.__context__ = second, first
    second.__cause__, first.__context__ = second, third
    reasons = list(reasons_of(third))
    assert len(reasons) == 3
    assert set(reasons) == {first, second, third}
