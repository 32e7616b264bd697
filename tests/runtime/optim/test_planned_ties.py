"""Networks whose distant layers share parameters: planned into balanced stages, and trained as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks.chains import cluster
from planner.ir.constraints import parse_rule
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from planner.ir.problem import ALWAYS, Problem
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance
from planner.solvers import solver
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from tests.captures import capture
from tests.oracles.plans import check
from tests.planner.solvers.clocks import Ticking, by_clock
from tests.runtime.plans import Trained, assert_equal, sgd
from tests.runtime.training import alone, by_plan, tied_model
from tests.zoo import ALL

BATCH = 8


class Shared(nn.Module):
    """A transformer with one embedding: of the encoder, the decoder and the output (Press and Wolf 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.output(self.transformer(self.embedding(source), self.embedding(target))).transpose(1, 2)


def shared() -> tuple[nn.Module, tuple[tuple[Tensor, Tensor], Tensor], nn.Module]:
    torch.manual_seed(0)
    source, target, words = (torch.randint(11, (BATCH, 5)) for _ in range(3))
    return Shared(), ((source, target), words), nn.CrossEntropyLoss()


NETWORKS = {
    "GPT-2": tied_model,
    "transformer": partial(load_model, ModelSource(f"{__name__}:shared", {}, (), "float64")),
    "siamese": partial(load_model, ALL["reuse:siamese"].source),
    "one block": partial(load_model, ALL["reuse:weight_sharing_loop"].source),
}


@cache
def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = NETWORKS[name]()
    return model, capture(model)


@cache
def expected(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return alone(network(name)[0], micro_batches, optimizer=sgd)[0]


def profile(graph: Graph, num_devices: int) -> Profile:
    """Every layer takes as long; summing the gradients of all takes longer than any message."""
    sizes = (1, 2, 4, 8)
    taken = tuple(
        Measurement(layer.name, n, 1e-3 * n, 2e-3 * n, 1e-3 * n, 1e-3 * n, 64 * n, 0, 3)
        for layer in graph.layers
        for n in sizes
    )
    known = set[str]()
    costs = dict[str, ParameterCost]()
    for layer in graph.layers:
        costs[layer.name] = ParameterCost(1e-5, 1e-4) if set(layer.parameters) - known else ParameterCost(0.0, 0.0)
        known |= set(layer.parameters)
    on = cluster((1.0,) * num_devices, latency_s=1e-5, bandwidth_bytes_per_s=1e9, all_reduce_latency_s=1e-5)
    (kind,) = {device.kind for device in on.devices}
    optimizer = Optimizer("AdamW", {}, 2.0)
    return Profile(
        ModelSource("tests:m"), optimizer, graph, on, {kind: taken}, {kind: costs}, Provenance({"torch": "0"})
    )


def planned(name: str, num_devices: int, **asked: object) -> Plan:
    rules = {key: tuple(map(parse_rule, asked.pop(key, ()))) for key in ("fix", "forbid")}
    problem = Problem(
        profile(network(name)[1].graph, num_devices), BATCH, time_limit_s=5.0, **rules, **{"confidence": 0.0, **asked}
    )
    with by_clock(Ticking(1e-3)):  # so many looks at the clock, however busy the machine is
        plan = solver("best-first")(problem)
    assert check(plan, problem.profile) == ()
    return plan


def parted(graph: Graph, decision: Decision) -> set[int]:
    """In how many stages each tie is."""
    layers = graph.layers
    return {
        len({decision.layers[layers[index].name].stage for index in users}) for users in graph.tied_layers().values()
    }


APART = ("*=replicas:2", "*=replicas:3", "*=replicas:4")
ASKED: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "1f1b": (2, {"schedules": ("1f1b",), "forbid": APART}),
    "1f1b on three": (3, {"schedules": ("1f1b",), "forbid": APART}),
    "zb-h1": (3, {"schedules": ("zb-h1",), "forbid": APART}),
    "interleaved": (2, {"schedules": ("interleaved",)}),
    "zb-v": (2, {"schedules": ("zb-v",)}),
    "chimera": (4, {"schedules": ("chimera",)}),
    "recomputed": (2, {"schedules": ("gpipe",), "forbid": APART, "recompute": ALWAYS}),
    "replicas": (4, {"schedules": ("1f1b",), "fix": ("*=replicas:2",)}),
    "unequal replicas": (3, {"schedules": ("1f1b",), "forbid": ("*=replicas:3",), "max_stages": 2}),
    "ZeRO-1": (4, {"schedules": ("1f1b",), "fix": ("*=replicas:2",), "shard": ALWAYS, "zero": 1}),
    "ZeRO-2": (4, {"schedules": ("1f1b",), "fix": ("*=replicas:2",), "shard": ALWAYS, "zero": 2}),
    "ZeRO-3": (4, {"schedules": ("1f1b",), "fix": ("*=replicas:2",), "shard": ALWAYS, "zero": 3}),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_parts_the_tied_layers_and_trains_as_one_device(name: str, asked: str) -> None:
    num_devices, options = ASKED[asked]
    decision = planned(name, num_devices, **options).decision
    model, captured = network(name)
    assert name == "siamese" or parted(captured.graph, decision) - {1}  # that may be cut through both encoders at once
    assert len(decision.used_ranks) == num_devices
    found, _ = by_plan(model, decision, optimizer=sgd)  # Adam would divide gradients that are 0 but for rounding
    one = expected(name, decision.micro_batches)
    divided = any(stage.sharded for stage in decision.stages)
    assert_equal(found, Trained(one.losses, {} if divided else one.gradients, one.state))


@pytest.mark.parametrize("name", NETWORKS)
def test_stages_of_tied_networks_are_balanced(name: str) -> None:
    decision = planned(name, 2, schedules=("1f1b",), forbid=APART).decision
    counts = [len(decision.layers_of(stage)) for stage in range(2)]  # every layer takes as long
    assert max(counts) <= 0.62 * sum(counts)
