"""The testbed's network as data: hosts, addresses, links, and the command lines that make them. Nothing runs here.

Every host is a network namespace with one link to a switch, which is a bridge in a namespace of its own. Both ends of a
link have a token bucket, so it carries its rate in each direction at once.
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

# A bucket below 64 kB would cut the kernel's segments in software; a queue of 1 MB is a switch port's buffer.
BURST = "128kb"
QUEUE = "1mb"

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the testbed.

    Parameters
    ----------
    name
        ``scheduler``, ``storage``, ``server`` or ``w1``, ``w2``, ...
    address
        Its IPv4 address.

    Examples
    --------
    >>> Host("w1", "10.78.0.11").namespace
    'dsh-w1'
    """

    name: str
    address: str

    @property
    def namespace(self) -> str:
        """Its network namespace, as ``ip netns`` shows it."""
        return PREFIX + self.name

    @property
    def port(self) -> str:
        """The switch's end of its link."""
        return f"p-{self.name}"


def plan_hosts(n_workers: int, server: bool) -> list[Host]:
    """All hosts, storage first: it must be there before anybody who reads.

    Raises
    ------
    click.BadParameter
        ``n_workers`` is not in 1..200.

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
    """Whether a network namespace has a name that a testbed gives.

    Examples
    --------
    >>> is_own("dsh-w12"), is_own("dsh-switch"), is_own("dsh-of-somebody")
    (True, True, False)
    """
    return re.fullmatch(rf"{PREFIX}(switch|storage|scheduler|server|w\d+)", namespace) is not None


def rate(text: str) -> str:
    """Check a link's rate in bits a second: ``100mbit``, ``2.5gbit``, or ``none`` for a link that is not limited.

    ``tc`` knows more units, among them ``mbps``, which means bytes: these are refused.

    Raises
    ------
    click.BadParameter
        The text is something else.

    Examples
    --------
    >>> rate("2.5Gbit")
    '2.5gbit'
    """
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(?:kbit|mbit|gbit)", text.lower())
    if text.lower() != "none" and (number is None or float(number[1]) == 0):
        raise click.BadParameter(
            f"{text!r} is not allowed; it must be like 100mbit or 2.5gbit (bits a second), or none"
        )
    return text.lower()


def switch_commands() -> list[Command]:
    """Make the switch."""
    inside = ("ip", "-n", SWITCH, "link")
    return [
        ("ip", "netns", "add", SWITCH),
        (*inside, "add", "bridge", "type", "bridge", "stp_state", "0", "forward_delay", "0"),
        (*inside, "set", "bridge", "up"),
    ]


def link_commands(host: Host) -> list[Command]:
    """Make a host's namespace, its link to the switch and its address."""
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
    """Limit both directions of a host's link to a rate; ``none`` takes the limit away.

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
    """What each host has sent and received so far, and packets that its link dropped on the way to it.

    Parameters
    ----------
    statistics
        Output of ``ip -s -j link`` in the switch: what comes into a port is what its host has sent.
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
