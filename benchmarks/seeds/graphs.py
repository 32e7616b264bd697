"""Sampled graph networks: how fast neighbours are drawn, what of it a step waits for, and jobs beside one device.

SALIENT (Kaler et al., MLSys 2022) samples in C++ threads, slices features into pinned memory while the GPU computes,
and trains a GraphSAGE of three layers on ogbn-papers100M 3x as fast as torch_geometric's own pipeline on one GPU.  Here
a step's neighbours and features are made in a thread during the step before.

- *Sampler*: edges a second of one thread, in processor time, on the generated graph of 1M nodes and 10M edges:
  compiled, and vectorised in numpy.  torch_geometric's ``NeighborLoader`` needs pyg-lib or torch-sparse, which PyPI
  does not have for this torch, so that it has no row.
- *Hidden*: of the thread's processor time, what the computing thread did not wait for (timed).  One rank: the thread
  has the second of two cores; with two ranks on two cores nothing is idle, and sampling costs what it takes.
- *Step*: predicted by a plan from a quick profile, measured in its run (timed).
- *Executed*: jobs of two ranks, whose shares are cut by edges, in float64 beside one device.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from benchmarks.report import Row, at_least
from benchmarks.seeds.jobs import folder_of, halopipe, largest_error
from cuda_ops.extras.sampling.draws import NeighbourDraws, PlainDraws, fastest
from cuda_ops.extras.sampling.generated import generated
from cuda_ops.extras.sampling.graph import NodeGraph
from cuda_ops.extras.sampling.sampler import NeighbourSampler
from halopipe.extras.sampled_graphs.seeds import seed_batches
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Placement, Stage
from profiler.capture.graph import capture
from profiler.extras.sampled_graphs.networks import sage
from profiler.source.parts import model_of
from runtime.engine import Engine
from runtime.pipeline.microbatches import WholeBatch
from runtime.rank import RankContext
from runtime.stage.shapes import step_inputs
from runtime.transport import Hub, InProcessTransport

NODES = 1_000_000
QUICK_NODES = 20_000
BATCH = 1024
FANOUTS = (15, 10, 5)
HIDDEN = 0.95

MODEL = "from profiler.models.graphs import {kind} as model\n"
DATA = ("--data", "halopipe.data:small_graph_seeds")


def rows(quick: bool) -> Iterator[Row]:
    """All rows; ``quick`` takes the graph of 20,000 nodes."""
    graph = generated(QUICK_NODES if quick else NODES)
    yield from sampler(graph)
    yield from hidden(graph, 10 if quick else 40)
    yield from step(quick)
    yield from executed(("sage",) if quick else ("sage", "gat"))


def sampler(graph: NodeGraph) -> Iterator[Row]:
    """Edges a second."""
    seeds = np.random.default_rng(0).integers(0, graph.num_nodes, BATCH)
    found = {}
    for name, draws in (("compiled", fastest()), ("numpy", PlainDraws())):
        found[name] = _rate(_levels(graph, draws, seeds), 7)
        yield Row(f"SALIENT, sampler, {name}", found[name] / 1e6, "M edges/s")
    yield at_least("SALIENT, sampler, compiled over numpy", found["compiled"] / found["numpy"], "x", 2)


def _levels(graph: NodeGraph, draws: NeighbourDraws, seeds: Any) -> Callable[[int], int]:
    sampling = NeighbourSampler(graph, FANOUTS, draws=draws)
    return lambda draw: sampling.levels(seeds, draw).num_edges


def _rate(sample: Callable[[int], int], runs: int) -> float:
    rates = []
    for draw in range(runs + 1):
        start_s = time.thread_time()
        edges = sample(draw)
        rates.append(edges / (time.thread_time() - start_s))
    return statistics.median(rates[1:])


def hidden(graph: NodeGraph, steps: int) -> Iterator[Row]:
    """Of a rank's sampling, what its steps did not wait for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = sampled_steps(graph, steps)
    finally:
        torch.set_num_threads(threads)
    name = f"SALIENT, {graph.num_nodes:,} nodes, one rank on two cores (timed)"
    yield at_least(f"{name}: PREP hidden", 100 * found.hidden, "%", 100 * HIDDEN)
    yield Row(f"{name}: sampling and features a step", 1e3 * found.prepare_s, "ms")
    yield Row(f"{name}: waited for them a step", 1e3 * found.waited_s, "ms")
    yield Row(f"{name}: a step", 1e3 * found.step_s, "ms")
    yield Row(f"{name}: a step without sampling ahead", 1e3 * found.serial_s, "ms")


@dataclass(frozen=True)
class SampledSteps:
    """Medians of a step's seconds.

    Attributes:
        prepare_s: processor time of the thread that samples; waited_s: of the other for it.
        serial_s: of a step whose batch was not known before.
    """

    prepare_s: float
    waited_s: float
    step_s: float
    serial_s: float

    @property
    def hidden(self) -> float:
        """The share of preparing that no step waited for."""
        return max(0.0, 1 - self.waited_s / self.prepare_s)


def sampled_steps(graph: NodeGraph, steps: int) -> SampledSteps:
    """Of one rank in this process, on one core; its thread samples on another."""
    network = sage(graph.num_nodes, samples=BATCH, width=64, fanouts=FANOUTS)
    model = model_of("graphs", network)
    captured = capture(model)
    end = InProcessTransport(Hub(1), 0)
    decision = one_rank(captured.graph)
    engine = Engine(RankContext(decision, sgd, model=captured, module=model.module, transport=end))
    specs = step_inputs(captured)
    batches = [
        WholeBatch(specs, (*inputs, labels), (BATCH,)) for inputs, labels in islice(seed_batches(graph, BATCH), steps)
    ]
    clock = engine.preparing.clock  # type: ignore[union-attr]  # it is a graph network
    found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for is_ahead in (False, True):
        if is_ahead:
            engine.expect(batches[0])
        for number, batch in enumerate(batches):
            before = clock.busy_s, clock.waited_s, time.perf_counter()
            if is_ahead and number + 1 < len(batches):
                engine.expect(batches[number + 1])
            engine.step_on(batch)
            after = clock.busy_s, clock.waited_s, time.perf_counter()
            found[is_ahead].append(tuple(b - a for a, b in zip(before, after, strict=True)))  # type: ignore[arg-type]
    ahead = [statistics.median(column) for column in zip(*found[True][2:-1], strict=True)]
    return SampledSteps(*ahead, statistics.median(step_s for *_, step_s in found[False][2:]))


def one_rank(graph: Graph) -> Decision:
    """All layers on one rank, in one micro-batch."""
    layers = {layer.name: Placement(0, {}) for layer in graph.layers}
    row = ("0PREP0", "0F0", "0B0", "0UPDATE")
    return Decision("1f1b", (BATCH,), (Stage((0,), ("n0/cpu0",)),), layers, (row,))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Of a stage's parameters."""
    return torch.optim.SGD(parameters, lr=0.01)


def step(quick: bool) -> Iterator[Row]:
    """Predicted beside measured."""
    with folder_of(MODEL.format(kind="sage")) as folder:
        halopipe(folder, "profile", "model.py:model", "--quick", "--arg", "samples=512", "--arg", "width=64")
        halopipe(folder, "plan", "profile.json", "--global-batch", "512", "--solver", "one-device")
        steps = "20" if quick else "60"
        told = json.loads(halopipe(folder, "run", "plan.json", *DATA, "--steps", steps, "--json"))
    predicted_s = told["predicted_step_s"]
    measured_s = told["measured"]["step_s"]
    yield Row("SALIENT, GraphSAGE on one rank (timed): measured step", 1e3 * measured_s, "ms")
    yield Row("SALIENT, GraphSAGE on one rank (timed): predicted over measured", predicted_s / measured_s, "x")


def executed(kinds: Sequence[str]) -> Iterator[Row]:
    """Jobs of two ranks."""
    for kind in kinds:
        plan = ("--solver", "data-parallel")
        yield largest_error(f"SALIENT, {kind}, two ranks", MODEL.format(kind=kind), plan=plan, run=DATA)
