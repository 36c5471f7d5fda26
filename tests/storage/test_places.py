"""Processes that outlive the command that started them, and the file that remembers them."""

import os
import subprocess
import sys

import click
import pytest

import places


@pytest.fixture
def place(tmp_path):
    here = places.this_machine(tmp_path / "state")
    yield here
    places.stop(here.state)


def test_only_the_named_are_stopped(place):
    for name in ("a.one", "a.two", "b.one"):
        place.start(name, "sleep", "1000")
    places.Place("there", "127.0.0.1", place.state).start("far", "sleep", "1000", environment={"LC_ALL": "C"})
    record = place.state.processes()["far"]
    assert places.alive(record)
    assert places.stop(place.state, "a.") == ["a.two", "a.one"]
    assert places.stop(place.state, host="there") == ["far"]
    assert not places.alive(record)
    assert list(place.state.processes()) == ["b.one"]


def test_one_that_ignores_the_request_is_killed(place, monkeypatch):
    monkeypatch.setattr(places, "PATIENCE_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    place.start("deaf", sys.executable, "-c", deaf)
    place.await_true("deaf", lambda: "deaf" in place.state.log("deaf").read_text(), "to speak")
    record = place.state.processes()["deaf"]
    assert places.stop(place.state) == ["deaf"]
    assert not places.alive(record)


def test_a_number_that_now_is_another_process_is_left_alone(place):
    place.start("gone", "sleep", "1000")
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        with place.state.change() as content:
            before = dict(content["processes"]["gone"])
            content["processes"]["gone"]["pid"] = stranger.pid
            content["processes"]["gone"]["started"] -= 1
        assert places.stop(place.state) == []
        assert stranger.poll() is None
        stranger.kill()
    os.kill(before["pid"], 9)


def test_what_fails_says_why(place):
    place.start("broken", sys.executable, "-c", "raise SystemExit('no such disk')")
    for call, words in (
        (lambda: place.await_port("broken", 1), "no such disk"),
        (lambda: place.run("cat", "/no/such/file"), "no/such/file"),
        (lambda: place.run("sleep", "10", timeout=0.1), "did not finish within"),
        (
            lambda: places.need_programs({"no-such-program": "package-of-it", "cat": ""}, "This"),
            "install package-of-it",
        ),
    ):
        with pytest.raises(click.ClickException, match=words):
            call()


def test_a_change_that_fails_changes_nothing(place):
    with place.state.change() as content:
        content["rate"] = "100mbit"

    def fail():
        with place.state.change() as content:
            content["rate"] = "none"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert place.state.read() == {"rate": "100mbit"}
