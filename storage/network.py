"""Description of the testbed's network: hosts, addresses, links, and the commands that create them.

This module runs no commands. Every host is a network namespace with one link to a switch, which is a bridge in its own
namespace. A token bucket at each end of a link limits its rate in each direction (full duplex).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import click

PREFIX = "dsh-"
SWITCH = f"{PREFIX}switch"
SUBNET = "10.78.0"
MAX_WORKERS = 200

# With a bucket below 64 kB the kernel would split segments in software. A queue of 1 MB is a switch port's buffer.
BURST = "128kb"
QUEUE = "1mb"

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the testbed.

    Parameters
    ----------
    name
        ``scheduler``, ``storage``, ``server`` or ``w1``, ``w2``, ...
    address
        IPv4 address.

    Examples
    --------
    >>> Host("w1", "10.78.0.11").namespace
    'dsh-w1'
    """

    name: str
    address: str

    @property
    def namespace(self) -> str:
        """Name of its network namespace, as listed by ``ip netns``."""
        return PREFIX + self.name

    @property
    def port(self) -> str:
        """Name of the switch port of its link."""
        return f"p-{self.name}"


def plan_hosts(n_workers: int, server: bool) -> list[Host]:
    """Return all hosts, storage first: it must exist before its readers.

    Raises
    ------
    click.BadParameter
        If ``n_workers`` is not in 1..200.

    Examples
    --------
    >>> [f"{host.name} {host.address}" for host in plan_hosts(2, server=False)]
    ['storage 10.78.0.4', 'scheduler 10.78.0.2', 'w1 10.78.0.11', 'w2 10.78.0.12']
    """
    if not 1 <= n_workers <= MAX_WORKERS:
        raise click.BadParameter(f"workers={n_workers} is not allowed; it must be from 1 to {MAX_WORKERS}")
    special = [Host("storage", f"{SUBNET}.4"), Host("scheduler", f"{SUBNET}.2")]
    if server:
        special.append(Host("server", f"{SUBNET}.3"))
    return special + [Host(f"w{rank}", f"{SUBNET}.{10 + rank}") for rank in range(1, n_workers + 1)]


def is_own(namespace: str) -> bool:
    """Whether a network namespace has a name used by a testbed.

    Examples
    --------
    >>> is_own("dsh-w12"), is_own("dsh-switch"), is_own("dsh-of-somebody")
    (True, True, False)
    """
    return re.fullmatch(rf"{PREFIX}(switch|storage|scheduler|server|w\d+)", namespace) is not None


def rate(text: str) -> str:
    """Check a link rate in bits per second: ``100mbit``, ``2.5gbit``, or ``none`` for an unlimited link.

    Other units of ``tc`` are rejected, because some of them, such as ``mbps``, mean bytes.

    Raises
    ------
    click.BadParameter
        If the text is not a rate.

    Examples
    --------
    >>> rate("2.5Gbit")
    '2.5gbit'
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:kbit|mbit|gbit)", text.lower())
    if text.lower() != "none" and (number is None or float(number[1]) == 0):
        raise click.BadParameter(
            f"{text!r} is not allowed; it must be like 100mbit or 2.5gbit (bits per second), or none"
        )
    return text.lower()


def switch_commands() -> list[Command]:
    """Return the commands that create the switch."""
    inside = ("ip", "-n", SWITCH, "link")
    return [
        ("ip", "netns", "add", SWITCH),
        (*inside, "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0"),
        (*inside, "set", "bridge", "up"),
    ]


def link_commands(host: Host) -> list[Command]:
    """Return the commands that create a host's namespace, its link to the switch and its address."""
    inside = ("ip", "-n", host.namespace)
    peer = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    return [
        ("ip", "netns", "add", host.namespace),
        ("ip", "link", "add", host.port, "netns", SWITCH, *peer),
        ("ip", "-n", SWITCH, "link", "set", host.port, "master", "bridge", "up"),
        (*inside, "link", "set", "lo", "up"),
        (*inside, "address", "add", f"{host.address}/24", "dev", "eth0"),
        (*inside, "link", "set", "eth0", "up"),
    ]


def shape_commands(host: Host, limit: str) -> list[Command]:
    """Return the commands that limit both directions of a host's link; ``none`` removes the limit.

    Examples
    --------
    >>> for command in shape_commands(Host("w1", "10.78.0.11"), "100mbit"):
    ...     print(*command)
    tc -n dsh-w1 qdisc replace dev eth0 root tbf rate 100mbit burst 128kb limit 1mb
    tc -n dsh-switch qdisc replace dev p-w1 root tbf rate 100mbit burst 128kb limit 1mb
    """
    discipline = ("noqueue",) if limit == "none" else ("tbf", "rate", limit, "burst", BURST, "limit", QUEUE)
    ends = ((host.namespace, "eth0"), (SWITCH, host.port))
    return [("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *discipline) for where, device in ends]


def link_bytes(statistics: str, hosts: Sequence[Host]) -> dict[str, dict[str, int]]:
    """Return the bytes that each host has sent and received, and the packets dropped on the way to it.

    Parameters
    ----------
    statistics
        Output of ``ip -s -j link`` in the switch. A port receives what its host sends.
    hosts
        Hosts to report.
    """
    ports = {link["ifname"]: link["stats64"] for link in json.loads(statistics)}
    return {
        host.name: {
            "sent": ports[host.port]["rx"]["bytes"],
            "received": ports[host.port]["tx"]["bytes"],
            "dropped": ports[host.port]["tx"]["dropped"],
        }
        for host in hosts
    }
