"""GraphPipe (Jeon et al., ASPLOS 2025): branches side by side over the best chain.

Networks of the kind of its three (branches of equal layers that a trunk joins), one device of eight a stage, 1F1B, 128
samples, costs in proportion to them: the best plan whose stages are a chain, each of which waits for the one before it,
over the best plan of the DAG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.report import Row
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.cluster import WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.constraints import parse_rule
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, ModelSource, Optimizer, Profile, Provenance
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.choose import best_of, heuristic_plan
from planner.solvers.candidates.evaluate import Evaluator

NUM_DEVICES = 8
LIMIT_S = 40.0
QUICK_LIMIT_S = 3.0
"""Of a search."""


@dataclass(frozen=True, slots=True)
class Network:
    """Branches of layers side by side, and a trunk behind them.

    Attributes:
        depths: layers of each branch.
        trunk: layers behind the branches; the first reads all of them.
        features: floats that a layer makes of a sample.
        layer_s: forward of a layer and sample; backward is twice that.
    """

    depths: tuple[int, ...]
    trunk: int
    features: int
    layer_s: float

    def graph(self, *, is_chain: bool) -> Graph:
        """As a chain, each layer also waits for a number that the one before it makes (:func:`builder`)."""
        layers, add = builder(self.features, is_chain=is_chain)
        ends = []
        for branch, depth in enumerate(self.depths):
            ends.append("x")
            for number in range(depth):
                ends[-1] = add(f"branch{branch}.{number}", (ends[-1],))
        last = add("join", tuple(ends))
        for number in range(1, self.trunk):
            last = add(f"trunk.{number}", (last,))
        return with_loss(layers, last, self.features)

    def profile(self, *, is_chain: bool, num_devices: int) -> Profile:
        """On devices of 32 GB with links of 12 GB/s."""
        return profile_of(self.graph(is_chain=is_chain), self.features, self.layer_s, num_devices)


def builder(features: int, *, is_chain: bool) -> tuple[list[Layer], Callable[[str, tuple[str, ...]], str]]:
    """Layers, and what adds one of a name that reads these; as a chain, each also waits for the one before it."""
    layers: list[Layer] = []

    def add(name: str, inputs: tuple[str, ...]) -> str:
        waits = (layers[-1].name,) if is_chain and layers else ()
        layers.append(Layer(name, "pointwise", (*inputs, *waits), (_made(features),), attributes=_RELU))
        if is_chain:
            layers.append(Layer(f"{name}.end", "pointwise", (name,), (_made(1),), attributes=_RELU))
        return name

    return layers, add


def with_loss(layers: Sequence[Layer], last: str, features: int) -> Graph:
    """The layers, and a loss of the last one."""
    op = {"op": "aten.cross_entropy_loss.default"}
    loss = Layer("loss", "loss", (last, "y"), (TensorSpec((), (), "float32"),), attributes=op)
    inputs = {"x": _made(features), "y": TensorSpec(("sample",), (1,), "int64")}
    return Graph(1, inputs, (*layers, loss), {}, "loss")


def profile_of(graph: Graph, features: int, layer_s: float, num_devices: int) -> Profile:
    """Of pointwise layers of a forward of ``layer_s`` and sample, on devices of 32 GB with links of 12 GB/s.

    Layers that end in ``.end`` take no time: they make the number that the next layer of a chain waits for.
    """
    found = []
    for samples in (1, 2, 4, 8, 16):
        for layer in graph.layers:
            works = layer.kind == "pointwise" and not layer.name.endswith(".end")
            once, kept = (layer_s * samples, 4 * features * samples) if works else (1e-9, 4 * samples)
            found.append(Measurement(layer.name, samples, once, 2 * once, once, once, kept, 0, 0))
    devices = tuple(DeviceSpec(f"n0/gpu{k}", "GPU", "n0", 32 * 10**9) for k in range(num_devices))
    return Profile(
        ModelSource("benchmarks.seeds:network"),
        Optimizer("SGD", {"lr": 0.1}, 0.0),
        graph,
        Cluster(devices, {WITHIN_HOST: Link(5e-6, 12e9)}),
        {"GPU": tuple(found)},
        {"GPU": {}},
        Provenance({"halopipe": "0", "torch": "0", "python": "0"}),
    )


_RELU = {"op": "aten.relu.default"}
NETWORKS = {
    "multi-modal": Network((8,) * 4, 4, 256 * 1024, 8e-4),
    "DLRM-like": Network((4,) * 7 + (1,) * 7, 4, 4096, 2e-5),
    "CANDLE-like": Network((4,) * 7, 4, 4096, 2e-5),
}


def _made(features: int) -> TensorSpec:
    return TensorSpec(("sample", "feature"), (1, features), "float32")


def rows(quick: bool) -> Iterator[Row]:
    """Branches side by side over the best chain; where the search for that was cut short, over its bound."""
    for name, network in NETWORKS.items():
        if quick and name != "CANDLE-like":
            continue
        for words, sizes in (("micro-batches of 16", (16,)), ("micro-batches of 4 to 16", (4, 8, 16))):
            limit_s = QUICK_LIMIT_S if quick else LIMIT_S
            best, chain = (best_plan(network, sizes, is_chain=each, limit_s=limit_s) for each in (False, True))
            least_s = min(chain.search.bound_s, chain.prediction.step_s)
            yield Row(f"GraphPipe, {name}, {words}: gain over the best chain", least_s / best.prediction.step_s, "x")


class Profiled(Protocol):
    """A network with its costs."""

    def profile(self, *, is_chain: bool, num_devices: int) -> Profile:
        """As it is, or as a chain."""


def best_plan(
    network: Profiled,
    sizes: tuple[int, ...],
    *,
    is_chain: bool,
    num_devices: int = NUM_DEVICES,
    limit_s: float = LIMIT_S,
) -> Plan:
    """The best pipeline of stages of one device."""
    profile = network.profile(is_chain=is_chain, num_devices=num_devices)
    fix = (parse_rule("*=replicas:1"),)
    return solve(
        Problem(
            profile, 128, schedules=("1f1b",), micro_batch_sizes=sizes, fix=fix, time_limit_s=limit_s, confidence=0.0
        )
    )


def best_of_these(
    problem: Problem, candidates: Callable[[Problem, CostModel], Iterable[Candidate]], solver: str, method: str
) -> Plan:
    """The plan of the best candidate; no bound is known.  Raises as :func:`best_of`."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    return heuristic_plan(evaluator, best_of(evaluator, candidates(problem, evaluator.cost_model)), solver, method)
