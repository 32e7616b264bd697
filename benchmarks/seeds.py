"""Systems that split a network in one more way: what each gains here beside what is published, and whether it is exact.

    python -m benchmarks.seeds [--quick] [--json]

*Predicted* gains are the simulator's, on equal stages with free messages; *closed forms* follow from bubbles, those of
Chimera as published:

- Chimera (Li and Hoefler, SC 2021, section 3): D stages, D micro-batches, a backward as long as a forward: bubbles of
  (D - 2) / (2 D + D - 2) of a step where 1F1B has (D - 1) / (2 D - 1).  The gain is 1F1B's step over Chimera's.
- Hanayo (Liu et al., SC 2023): W waves on p positions, p micro-batches, a backward of twice a forward: (2 p - 2) /
  (3 p W + 2 p - 2), as we count them, over 1F1B's (p - 1) / (2 p - 1).
- PipeDream-2BW (Narayanan et al., ICML 2021): m micro-batches on p stages with a flush, over the same without one:
  (m + p - 1) / m.
- PPLL: four stages with losses of their own under 1F1B, over the same with gradients.
- GraphPipe (Jeon et al., ASPLOS 2025): networks of the kind of its three (branches of equal layers that a trunk joins),
  one device of eight a stage, 1F1B, 128 samples, costs in proportion to them: the best plan whose stages are a chain,
  each of which waits for the one before it, over the best plan of the DAG.

*Executed* are jobs of two workers of this host in float64, as ``halopipe run --check-numerics`` compares them: the
largest relative error of any gradient, parameter, buffer or loss.  Of DistDL's primitives (Hewett and Grady, arXiv
2006.03108) it is |<F x, y> - <x, F* y>| / |x| |y| on random layouts, on four ranks that are threads.  No clocks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, at_most, run
from planner.costs.simulator.events import execute
from planner.costs.simulator.program import compile_program
from planner.ir.box import Interval
from planner.ir.cluster import WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.constraints import parse_rule
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, ModelSource, Optimizer, Profile, Provenance
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, Edge, Op, Pipeline, StageGraph
from planner.passes import lower
from planner.schedules import positions, schedule
from planner.solvers.best_first.solver import solve

TOLERANCE, ADJOINT = 1e-10, 1e-13
NUM_DEVICES = 8
_PART = (Part("x", (Interval(0, 1),), 4),)

MODEL = """
from torch import nn, randint, randn


def model():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(288, 32), nn.Tanh(), nn.Linear(32, 10))
    return network, (randn(16, 1, 8, 8), randint(10, (16,))), nn.CrossEntropyLoss()
"""

EXECUTED = {
    "Chimera": ([], ["--schedule", "chimera"]),
    "Hanayo": ([], ["--schedule", "hanayo"]),
    "PPLL": (["--local-loss", "2"], ["--schedule", "1f1b", "--fix", "*=replicas:1", "--fix", "blocks.1.0=stage:1"]),
}
"""By system, options of ``profile`` and of ``plan``."""


def measure(quick: bool) -> list[Row]:
    """All rows."""
    return [*predicted(), *branches(quick), *executed(), adjoints(20 if quick else 200)]


def predicted() -> Iterator[Row]:
    """What is arithmetic."""
    for depth in (4, 8, 16):
        gain = step_s("1f1b", depth, depth) / step_s("chimera", depth // 2, depth // 2, 2)
        yield from _gains(
            f"Chimera, {depth} stages", gain, (depth - 2) / (3 * depth - 2), (depth - 1) / (2 * depth - 1)
        )
    for p, waves in ((4, 1), (4, 2), (8, 4)):
        part = 1 / (2 * waves)
        gain = step_s("1f1b", p, p, backward=2.0) / step_s("hanayo", p, p, 2 * waves, part, 2 * part)
        bubble = (2 * p - 2) / (3 * p * waves + 2 * p - 2)
        yield from _gains(f"Hanayo, {p} positions, {waves} waves", gain, bubble, (p - 1) / (2 * p - 1))
    p, m = 4, 8
    endless = step_s("pipedream-2bw", p, 3 * m) - step_s("pipedream-2bw", p, 2 * m)
    yield from _gains("PipeDream-2BW, no flush", step_s("pipedream-2bw", p, m) / endless, 0.0, (p - 1) / (m + p - 1))
    apart = step_s("1f1b", p, m, backward=2.0, gradient=False)
    lost = (p - 1) / (3 * m + p - 1)
    yield from _gains("PPLL, 4 stages", step_s("1f1b", p, m, backward=2.0) / apart, lost, (p - 1) / (m + p - 1))


def _gains(name: str, gain: float, bubble: float, before: float) -> Iterator[Row]:
    """Predicted, and that of a step with ``bubble`` where it had ``before``; they are one number."""
    closed = (1 - bubble) / (1 - before)
    yield Row(f"{name}: predicted gain", gain, "x", f"{closed:.6g}", abs(gain - closed) <= 1e-9 * closed)
    yield Row(f"{name}: closed form", closed, "x")


def step_s(
    name: str,
    num_positions: int,
    num_microbatches: int,
    per_position: int = 1,
    forward: float = 1.0,
    backward: float = 1.0,
    *,
    gradient: bool = True,
) -> float:
    """A step of equal stages, by the simulator; updates and messages take no time."""
    count = num_positions * per_position
    edges = tuple(Edge(s, s + 1, ("x",), gradient) for s in range(count - 1))
    stages = StageGraph(count, num_microbatches, edges)
    where = positions(name, num_positions, per_position)
    routes = {
        (edge.src, edge.dst, m): (Message(where[edge.src], where[edge.dst], _PART, _PART if gradient else ()),)
        for edge in edges
        for m in range(num_microbatches)
    }
    ranks = tuple((position,) for position in where)
    program = lower(schedule(name)(Pipeline(stages, where)), stages, ranks, routes, num_positions)
    compiled = compile_program(program, (1,) * num_microbatches)
    lasts = {Op.FORWARD: forward, Op.BACKWARD: backward}
    prices = [0.0 if a.action.op in MESSAGE else lasts.get(a.action.op, 0.0) for a in compiled.actions]
    wires = [slot for slot, _ in compiled.messages]
    found = execute(compiled, prices, [0.0] * len(compiled.transfers), range(len(wires)))
    return found.step_s


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
        """As a chain, each layer also waits for a number that the one before it makes."""
        layers: list[Layer] = []

        def add(name: str, inputs: tuple[str, ...]) -> str:
            waits = (layers[-1].name,) if is_chain and layers else ()
            layers.append(Layer(name, "pointwise", (*inputs, *waits), (_made(self.features),), attributes=_RELU))
            if is_chain:
                layers.append(Layer(f"{name}.end", "pointwise", (name,), (_made(1),), attributes=_RELU))
            return name

        ends = []
        for branch, depth in enumerate(self.depths):
            ends.append("x")
            for number in range(depth):
                ends[-1] = add(f"branch{branch}.{number}", (ends[-1],))
        last = add("join", tuple(ends))
        for number in range(1, self.trunk):
            last = add(f"trunk.{number}", (last,))
        op = {"op": "aten.cross_entropy_loss.default"}
        layers.append(Layer("loss", "loss", (last, "y"), (TensorSpec((), (), "float32"),), attributes=op))
        inputs = {"x": _made(self.features), "y": TensorSpec(("sample",), (1,), "int64")}
        return Graph(1, inputs, tuple(layers), {}, "loss")

    def profile(self, *, is_chain: bool, num_devices: int) -> Profile:
        """On devices of 32 GB with links of 12 GB/s."""
        graph, found = self.graph(is_chain=is_chain), []
        for samples in (1, 2, 4, 8, 16):
            for layer in graph.layers:
                works = layer.kind == "pointwise" and not layer.name.endswith(".end")
                once, kept = (self.layer_s * samples, 4 * self.features * samples) if works else (1e-9, 4 * samples)
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


def branches(quick: bool) -> Iterator[Row]:
    """Branches side by side over the best chain; where the search for that was cut short, over its bound."""
    for name, network in NETWORKS.items():
        if quick and name != "CANDLE-like":
            continue
        for words, sizes in (("micro-batches of 16", (16,)), ("micro-batches of 4 to 16", (4, 8, 16))):
            best, chain = (best_plan(network, sizes, is_chain=is_chain) for is_chain in (False, True))
            least_s = min(chain.search.bound_s, chain.prediction.step_s)
            yield Row(f"GraphPipe, {name}, {words}: gain over the best chain", least_s / best.prediction.step_s, "x")


def best_plan(
    network: Network, sizes: tuple[int, ...], *, is_chain: bool, num_devices: int = NUM_DEVICES, limit_s: float = 40.0
) -> Plan:
    """The best pipeline of stages of one device."""
    profile = network.profile(is_chain=is_chain, num_devices=num_devices)
    fix = (parse_rule("*=replicas:1"),)
    return solve(Problem(profile, 128, ("1f1b",), sizes, fix=fix, time_limit_s=limit_s))


def executed() -> Iterator[Row]:
    """Jobs of two workers beside one device."""
    for name, (profile, plan) in EXECUTED.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
            _halopipe(folder, "profile", "model.py:model", "--quick", "--dtype", "float64", *profile)
            _halopipe(folder, "plan", "profile.json", "--global-batch", "32", "--micro-batch", "8", *plan)
            told = _halopipe(folder, "run", "plan.json", "--steps", "3", "--check-numerics", "--json")
            worst = json.loads(told)["numerics"]["worst"]
            error = max(each["error"] for each in worst.values())
            yield at_most(f"{name}, executed: largest error", error, "relative", TOLERANCE)


def _halopipe(folder: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "halopipe", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"halopipe {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout


def adjoints(count: int) -> Row:
    """The worst of random exchanges among four ranks."""
    import torch

    from halopipe.primitives import Partition, Ranks, repartition
    from runtime.transport import Hub, InProcessTransport

    torch.set_num_threads(1)
    rng, worst = random.Random(0), 0.0
    for _ in range(count):
        shape = tuple(rng.randint(2, 9) for _ in range(rng.randint(1, 3)))
        source, target = (Partition.of(shape, {dim: _cuts(rng, shape[dim])}) for dim in _dims(rng, shape))
        wanted = target.grown({0: (rng.randint(0, 3), rng.randint(0, 3))}, outside=True)
        hub, products = Hub(4, ()), [torch.zeros(4)] * 4

        def one(rank: int, hub: Hub = hub, found: list[torch.Tensor] = products) -> None:
            ranks = Ranks.over(InProcessTransport(hub, rank), timeout_s=60.0)
            generator = torch.Generator().manual_seed(rank)
            parts = (source.local_shape(rank), wanted.local_shape(rank))  # noqa: B023  # it ends within the turn
            x, y = (torch.randn(each, generator=generator, dtype=torch.float64) for each in parts)
            x.requires_grad_()
            made = repartition(x, source, wanted, ranks)  # noqa: B023
            (back,) = torch.autograd.grad(made, x, y)
            found[rank] = torch.stack([(made * y).sum(), (x * back).sum(), x.square().sum(), y.square().sum()]).detach()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there, here, of_x, of_y = torch.stack(products).sum(0).tolist()
        worst = max(worst, abs(there - here) / max(1e-30, of_x * of_y) ** 0.5)
    return at_most(f"DistDL, {count} adjoints: largest error", worst, "relative", ADJOINT)


def _dims(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, int]:
    return rng.randrange(len(shape)), rng.randrange(len(shape))


def _cuts(rng: random.Random, extent: int) -> tuple[int, ...]:
    return (0, *sorted(rng.randint(0, extent) for _ in range(3)), extent)


if __name__ == "__main__":
    raise SystemExit(run("Systems that split a network in one more way", measure))
