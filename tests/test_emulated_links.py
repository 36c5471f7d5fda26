from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.compare import AS_THEY_ARE, EmulatedRates
from dshuffle.emulated_links import HEADERS, EmulatedLink, emulated
from dshuffle.errors import InvalidParameter

SIZES = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), min_size=1)


@given(SIZES)
def test_a_link_is_never_faster_than_its_rate_and_never_idle_while_bytes_wait(transfers):
    rate = 1e5
    link = EmulatedLink(rate * HEADERS)
    free = now = 0.0
    for nbytes, later in transfers:
        now += later
        end = link.reserve(nbytes, begin=now)
        free = max(free, now) + nbytes / rate
        assert end == pytest.approx(free)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=40))
def test_bytes_that_come_late_use_time_in_which_the_link_was_idle(transfers):
    """Against a calendar of single ticks: the first free ones are taken, whatever the order of the transfers."""
    link, taken = EmulatedLink(HEADERS), set()
    for nbytes, begin in transfers:
        end = begin
        for _ in range(nbytes):
            while end in taken:
                end += 1
            taken.add(end)
            end += 1
        if nbytes:
            assert link.reserve(nbytes, begin=begin) == pytest.approx(end)


def test_bytes_pass_both_links_at_the_same_time_but_those_of_two_senders_one_after_the_other():
    async def receive() -> list[float]:
        out, other, into = (EmulatedLink(10e6) for _ in range(3))

        async def pass_on(link: EmulatedLink) -> float:
            await into.receive(1_000_000, await link.send(1_000_000))
            return time.monotonic() - began

        began = time.monotonic()
        return sorted(await asyncio.gather(pass_on(out), pass_on(other)))

    first, second = asyncio.run(receive())
    alone = 1e6 * HEADERS / 10e6
    assert alone <= first
    assert 2 * alone <= second + 0.01
    assert second - first > 0.5 * alone


def test_links_are_emulated_where_the_configuration_says_so():
    assert emulated("links", "a") is None
    with dask.config.set({"dshuffle.emulated-links": "10mbit"}):
        assert emulated("links", "a") is emulated("links", "a")
        assert emulated("links", "a") is not emulated("links", "b")
        assert emulated("store") is None
    wrong = dask.config.set({"dshuffle.emulated-store": "fast"})
    with wrong, pytest.raises(InvalidParameter, match=r"dshuffle.emulated-store='fast'"):
        emulated("store")


def test_reading_takes_as_long_as_the_emulated_store_does(tmp_path):
    arrays = {"x": np.random.default_rng(0).random((2000, 100))}
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", arrays, chunk_rows=100)
    with dask.config.set({"dshuffle.emulated-store": "2MB/s"}):
        began = time.monotonic()
        read = dataset.read_rows(np.arange(2000))["x"]
        took = time.monotonic() - began
    assert np.array_equal(read, arrays["x"])
    assert took > dataset.traffic.fetched_bytes * HEADERS / 2e6


def test_what_is_read_of_an_emulated_store_passes_the_link_into_its_worker(monkeypatch):
    """As it would pass a network card: rows of other workers have to wait for it."""
    monkeypatch.setattr("dshuffle.emulated_links.Worker._instances", [SimpleNamespace(address="tcp://only:1")])
    with dask.config.set({"dshuffle.emulated-store": "100MB/s", "dshuffle.emulated-links": "1.5MB/s"}):
        began = time.monotonic()
        asyncio.run(emulated("store").send(300_000))
        assert time.monotonic() - began > 0.3 * HEADERS / 1.5
        end = emulated("links", "into tcp://only:1").reserve(300_000, begin=began)
    assert end > began + 0.5 * HEADERS / 1.5, "it was busy"


def test_rates_in_words_and_as_configuration():
    assert str(AS_THEY_ARE) == ""
    assert AS_THEY_ARE.configuration(3) == {}
    assert str(EmulatedRates(store=1e9)) == "a store of 8 Gbit/s"
    assert EmulatedRates(store=1e9).configuration(4) == {"dshuffle.emulated-store": "250000000.0B"}
