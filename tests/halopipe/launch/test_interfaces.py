from __future__ import annotations

import socket

import pytest

from halopipe.launch.interfaces import (
    GLOO,
    LOOPBACK,
    address_of,
    address_towards,
    choose_gloo_interface,
    interface_towards,
    interfaces,
)
from planner.ir.errors import UsageError


def test_the_loopback_interface_leads_to_this_host() -> None:
    assert interfaces()["lo"] == LOOPBACK
    assert (address_of("lo"), address_of(LOOPBACK), address_towards("localhost")) == (LOOPBACK,) * 3
    assert interface_towards(LOOPBACK) == interface_towards("127.0.1.1") == "lo"


def test_with_other_hosts_the_loopback_interface_is_never_meant() -> None:
    assert interface_towards(LOOPBACK, several_hosts=True) != "lo"


def test_an_interface_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(UsageError, match="this host has no interface nowhere0") as caught:
        address_of("nowhere0")
    assert "lo (127.0.0.1)" in caught.value.details[0]


def test_a_host_without_a_way_to_it_is_named() -> None:
    with pytest.raises(UsageError, match=r"no way from this host to no-such-host\.invalid"):
        address_towards("no-such-host.invalid")


def test_gloo_is_told_the_way_to_the_master_unless_somebody_said_so() -> None:
    environment = {"MASTER_ADDR": LOOPBACK, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    choose_gloo_interface(environment)
    assert environment[GLOO] == "lo"
    for known in ({"MASTER_ADDR": LOOPBACK, GLOO: "eth7"}, {"WORLD_SIZE": "2"}):
        before = dict(known)
        choose_gloo_interface(known)
        assert known == before


def test_the_address_is_one_that_can_be_bound_to() -> None:
    with socket.create_server((address_of("lo"), 0)) as listener:
        assert listener.getsockname()[0] == LOOPBACK
