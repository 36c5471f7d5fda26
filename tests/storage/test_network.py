"""The plan of the testbed: addresses and command lines, without running any."""

import doctest
import importlib
import json
from ipaddress import ip_address, ip_network

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import network


@given(st.integers(1, network.MAX_WORKERS), st.booleans())
def test_hosts_have_addresses_of_their_own(workers, server):
    hosts = network.plan_hosts(workers, server)
    assert len(hosts) == workers + 2 + server
    for what in ("name", "address", "namespace", "port"):
        assert len({getattr(host, what) for host in hosts}) == len(hosts)
    assert all(ip_address(host.address) in ip_network(f"{network.SUBNET}.0/24") for host in hosts)
    # Names of network interfaces have at most 15 characters.
    assert all(len(host.port) <= 15 and network.is_own(host.namespace) for host in hosts)
    assert [host for host in hosts if host.name != "server"] == network.plan_hosts(workers, False)


def test_numbers_of_workers_and_rates():
    assert [network.rate(text) for text in ("100mbit", "2.5GBIT", "none")] == ["100mbit", "2.5gbit", "none"]
    for text in ("100", "100mbps", "0mbit", "-1mbit", "fast", "", "100 mbit", "mbit", "1e3mbit"):
        with pytest.raises(click.BadParameter, match="must be like 100mbit"):
            network.rate(text)
    for workers in (0, -1, network.MAX_WORKERS + 1):
        with pytest.raises(click.BadParameter, match=f"workers={workers} is not allowed"):
            network.plan_hosts(workers, False)


def test_both_ends_of_a_link_are_shaped():
    host = network.Host("w7", "10.78.0.17")
    here, there = network.shape_commands(host, "1gbit")
    assert here[:3] == ("tc", "-n", "dsh-w7")
    assert here[6] == "eth0"
    assert there[:3] == ("tc", "-n", "dsh-switch")
    assert there[6] == "p-w7"
    assert here[7:] == there[7:] == ("root", "tbf", "rate", "1gbit", "burst", "128kb", "limit", "1mb")
    assert all("tbf" not in command for command in network.shape_commands(host, "none"))


def test_what_comes_into_a_port_was_sent_by_its_host():
    hosts = network.plan_hosts(1, False)
    links = []
    for rank, host in enumerate(hosts):
        counts = {"rx": {"bytes": 10 + rank}, "tx": {"bytes": 20 + rank, "dropped": rank}}
        links.append({"ifname": host.port, "stats64": counts})
    counted = network.link_bytes(json.dumps([*links, {"ifname": "other", "stats64": {}}]), hosts)
    assert counted["storage"] == {"sent": 10, "received": 20, "dropped": 0}
    assert counted["w1"] == {"sent": 12, "received": 22, "dropped": 2}


@pytest.mark.parametrize("module", ["network", "nfs", "sharedfs"])
def test_examples(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted
    assert not results.failed
