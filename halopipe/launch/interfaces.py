"""The network interfaces of this host: which of them leads to another, and at which address.

Gloo connects to the address that a host's own name resolves to, which on many hosts is the loopback interface's; hence
every process is told the interface that leads to the job's store.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, MutableMapping

from planner.ir.errors import UsageError

LOOPBACK = "127.0.0.1"
GLOO = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANYWHERE = "192.0.2.1"  # for documentation (RFC 5737): nobody is there, and nothing is sent


def interfaces() -> dict[str, str]:
    """IPv4 addresses by name of interface; those without one are left out."""
    found = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(interface: str) -> str:
    """The address to bind to: that of an interface of this host, or ``interface`` itself if it is such an address.

    Raises:
        UsageError: this host has no such interface.
    """
    known = interfaces()
    if interface in known.values():
        return interface
    if interface not in known:
        raise UsageError(
            f"this host has no interface {interface}",
            [f"it has {', '.join(f'{name} ({address})' for name, address in known.items())}"],
            ["name one of these with --interface"],
        )
    return known[interface]


def address_towards(host: str) -> str:
    """The address of this host from which ``host`` is reached.

    Raises:
        UsageError: there is no such host, or no way to it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # chooses a route; a datagram socket sends nothing by that
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"no way from this host to {host}",
            [str(error)],
            ["name the interface that leads to the others: --interface eth0"],
        ) from error


def interface_towards(host: str, several_hosts: bool = False) -> str:
    """The name of the interface that leads to ``host``; empty if it cannot be told.

    Args:
        several_hosts: the others are not all on this host, so that the loopback interface cannot be meant: a host's own
            name often resolves to it.
    """
    for target in (host, _ANYWHERE):
        with contextlib.suppress(UsageError):
            address = address_towards(target)
            if not (several_hosts and is_loopback(address)):
                return _interface_with(address)
    others = [name for name, address in interfaces().items() if not is_loopback(address)]
    return others[0] if others else ""


def choose_gloo_interface(environment: MutableMapping[str, str]) -> None:
    """Tell gloo the interface that leads to ``MASTER_ADDR``, where the job's environment does not name one."""
    master = environment.get("MASTER_ADDR", "")
    if environment.get(GLOO) or not master:
        return
    found = interface_towards(master, several_hosts=_spans_hosts(environment))
    if found:
        environment[GLOO] = found


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the address."""
    return ipaddress.ip_address(address).is_loopback


def _interface_with(address: str) -> str:
    otherwise = "lo" if is_loopback(address) else ""  # 127.0.1.1 is on no list
    return next((name for name, found in interfaces().items() if found == address), otherwise)


def _spans_hosts(environment: Mapping[str, str]) -> bool:
    return environment.get("LOCAL_WORLD_SIZE", "") not in ("", environment.get("WORLD_SIZE"))
