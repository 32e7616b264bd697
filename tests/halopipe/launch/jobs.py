"""Jobs of these tests: what torchrun would tell their ranks, and networks that fail."""

from __future__ import annotations

import json
import socket

import torch
from torch import nn
from torch.nn import functional

from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.models.example import Example
from tests.halopipe import bombs
from tests.halopipe.plans import plan_of


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def places(num_ranks: int, **more: str) -> list[dict[str, str]]:
    """The environment of each rank of a job of this host, with what ``more`` says."""
    known = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    return [{**known, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def doomed(*, input_shape: tuple[int, ...] = (4, 3), deeds: list[list[str]]) -> Example:
    """A layer for each pair of deeds, of its forward and of its backward (:mod:`tests.halopipe.bombs`), and dropout."""
    parts = [part for forward, backward in deeds for part in (bombs.Layer(3, forward, backward), nn.Dropout(0.2))]
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(input_shape, generator=generator) for _ in range(2))
    return nn.Sequential(*parts), (inputs, targets), functional.mse_loss


def plan_of_deeds(*deeds: tuple[str, str]) -> Plan:
    """Two stages of such layers."""
    source = ModelSource(f"{__name__}:doomed", {"deeds": json.dumps(deeds)}, (4, 3))
    return plan_of(source, [0.5])
