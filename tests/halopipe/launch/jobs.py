"""Jobs of these tests: what torchrun would tell their ranks, and plans of networks that fail."""

from __future__ import annotations

import json
import socket

from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def places(num_ranks: int, **more: str) -> list[dict[str, str]]:
    """The environment of each rank of a job of this host, with what ``more`` says."""
    known = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    return [{**known, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def plan_of_deeds(*deeds: tuple[str, str]) -> Plan:
    """Two stages of such layers."""
    source = ModelSource("tests.halopipe.launch.networks:doomed", {"deeds": json.dumps(deeds)}, (4, 3))
    return plan_of(source, [0.5])
