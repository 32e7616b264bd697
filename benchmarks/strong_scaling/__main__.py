"""One step's work on more and more devices: measured on 1, 2 and 4 ranks, predicted up to 64, layer by layer as well.

Each network is profiled in the same run, with its parts for up to four ranks at their own shapes
(``planner.costs.layers.part_shapes``), and divided over N ranks, all in one stage and one micro-batch, by

    samples             as far as the batch goes: two
    best of space       the same grid over height and width for every layer, the one predicted to be fastest
    best of both        the same grid over samples, height and width
    Dryden              the shortest-path heuristic of Dryden et al. 2019
    best mix            the planner's layout for each layer, channels included

Up to four ranks the plans are run: processes of this machine in shared memory, a thread and a core each; one device has
its turn after each plan of two ranks, and a speed-up is over the mean of its turns before and behind.  *Where ranks
share a core* (four on two) no clock on the wall says anything about four devices; there the processor time of the
busiest rank stands for its step, messages' work included and waiting for others left out.  Speed-ups are told by
processor time on two ranks as well, which other programs disturb less.  Losses of all plans are compared.

Layer by layer: the profile's seconds of every part that was measured at exactly the shape a rank computes, beside that
rank's processor time inside the running stage (``layer_clock``), forward and backward.  The stage's seconds hold the
packing of messages, the sums of a batch normalisation and the local form's own Python; the profile's do not.  On one
rank the two differ by neither, so that row shows how well the profile itself holds inside a network.

Beyond four ranks devices are like those of this machine, on one host, with the links measured between two processes;
parts are read between those measured (``costs.layers.shards``), and a row says how much of the compute was measured.
The 1K mesh-tangling network, too large to be run here, is priced by rooflines on hosts of four V100.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.devices.layer_clock import LayerClock
from benchmarks.devices.ranks import CapturedNetwork, hide_gpus, on_ranks, sgd
from benchmarks.report import Row, run
from benchmarks.strong_scaling.layouts import (
    ALL,
    LayerPoint,
    Point,
    Way,
    Ways,
    enlarged_graph,
    further_rows,
    large_rows,
    num_cores,
    roofline_profile,
    rows_of,
    shapes_of,
)
from benchmarks.turns import no_collector
from planner.ir.plan import Decision
from planner.ir.problem import SAMPLE_DIMS, SPATIAL_DIMS
from planner.ir.profile import ModelSource, Profile
from profiler import profile
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import Transport, open_shared

SAMPLES = 2
RUN_ON = (1, 2, 4)
PREDICTED_ON = (16, 64)
MOST_OPTIONS = 16
"""Layouts of a layer that the mix is chosen from on more ranks than are run; all of them on fewer."""
SOURCES: Mapping[str, ModelSource] = {
    "mesh-tangling 128": ModelSource(
        "profiler.models.mesh_tangling:mesh_tangling_128", {"width": "0.5"}, (4, 18, 128, 128)
    ),
    "ResNet-50": ModelSource("profiler.models.resnet:resnet50", {}, (4, 3, 112, 112)),
}
MESH_1K = ModelSource("profiler.models.mesh_tangling:mesh_tangling_1k", {}, (4, 18, 64, 64))
LARGER = 16
"""The 1K network is captured at this part of its height and width."""
V100_ON = (4, 16, 64)


def measure(quick: bool) -> list[Row]:
    """Strong scaling of each network, then the large one by its model."""
    rows: list[Row] = []
    for number, (network, source) in enumerate(SOURCES.items()):
        if quick and number:
            break
        found = profiled(source, quick)
        points = list(strong(network, found, Network(source), quick))
        rows += rows_of(points)
        if not quick:
            rows += further_rows(points, list(predicted(network, found, PREDICTED_ON)))
    if not quick:
        rows += large_rows(list(large(V100_ON)))
    return rows


def profiled(source: ModelSource, quick: bool, weak: bool = False) -> Profile:
    """With parts for all ranks that are run; ``weak``: also of larger batches, whole."""
    sizes = (1, 2, 4) if weak else (1, SAMPLES)
    allow, ranks = ((SAMPLE_DIMS, SPATIAL_DIMS), 2) if quick else (ALL, max(RUN_ON))
    return profile(source, num_workers=2, sizes=sizes, quick=quick, shapes=shapes_of((SAMPLES,), allow, ranks))


def strong(network: str, found: Profile, model: Network, quick: bool = False) -> Iterator[Point]:
    """The same batch on 1, 2 and 4 ranks, run.

    Raises:
        RuntimeError: two ways to divide the network compute different losses.
    """
    losses = {}
    steps = 5 if quick else 10
    alone_s = 0.0
    one = None
    for ranks in RUN_ON[: 2 if quick else None]:
        ways = Ways(found, SAMPLES, ranks, (SAMPLE_DIMS, SPATIAL_DIMS) if quick else ALL)
        for role, way in chosen(ways):
            ran = model.run(way.decision, steps, 4 if quick else 8)
            point = run_point(network, SAMPLES, role, ways, way, ran)
            losses[point.name] = ran.loss
            if one is None:
                one = way.decision
                alone_s = ran.step_s
            elif ranks <= num_cores():
                before_s = alone_s
                alone_s = model.run(one, steps).step_s
                point = replace(point, alone_s=(before_s + alone_s) / 2)
            yield point
    require_equal_losses(losses)


def weak(network: str, found: Profile, model: Network, further: Sequence[int] = PREDICTED_ON) -> Iterator[Point]:
    """One sample a rank, samples cut; ``further`` are counts of ranks that are predicted alone."""
    for ranks in (*RUN_ON, *further):
        ways = Ways(found, ranks, ranks, (SAMPLE_DIMS,))
        way = ways.uniform({"sample": ranks})
        if ranks in RUN_ON:
            yield run_point(network, ranks, "samples", ways, way, model.run(way.decision, 16))
        else:
            yield predicted_point(network, ranks, "samples", ways, way)


def predicted(network: str, found: Profile, counts: Sequence[int]) -> Iterator[Point]:
    """The same batch on more ranks than this machine could run."""
    for ranks in counts:
        ways = Ways(found, SAMPLES, ranks)
        for role, way in chosen(ways, MOST_OPTIONS):
            yield predicted_point(network, SAMPLES, role, ways, way)


def large(counts: Sequence[int]) -> Iterator[Point]:
    """The 1K network on V100s, four a host, one sample for every so many of them."""
    graph = enlarged_graph(MESH_1K, LARGER)
    for ranks in counts:
        ways = Ways(roofline_profile(MESH_1K, graph, ranks), graph.samples, ranks)
        for role, way in chosen(ways, MOST_OPTIONS):
            yield predicted_point("mesh-tangling 1K", graph.samples, role, ways, way)


def chosen(ways: Ways, most_options: int = 0) -> Iterator[tuple[str, Way]]:
    """The ways that are looked at, with their roles; those that are the same as one before are left out."""
    ranks = len(ways.problem.ranks)
    if ranks == 1:
        yield "one device", ways.uniform({})
        return
    seen: list[Mapping[int, object]] = []
    for role, way in _candidates(ways, most_options):
        if way.options not in seen:
            seen.append(way.options)
            yield role, way


def _candidates(ways: Ways, most_options: int) -> Iterator[tuple[str, Way]]:
    ranks = len(ways.problem.ranks)
    if ways.problem.global_batch % ranks == 0:
        yield "samples", ways.uniform({"sample": ranks})
    yield "best of space", ways.best_uniform(("height", "width"))
    yield "best of both", ways.best_uniform()
    yield "Dryden", ways.dryden()
    yield "best mix", ways.mix(most_options)


def predicted_point(network: str, samples: int, role: str, ways: Ways, way: Way) -> Point:
    """What is known of a way without running it."""
    return Point(
        network,
        len(ways.problem.ranks),
        samples,
        role,
        way.name,
        dict(way.layers_by_split().most_common()),
        way.step_s,
        way.prediction.evidence,
        ways.measured_share(way),
        way.is_proven,
    )


def run_point(network: str, samples: int, role: str, ways: Ways, way: Way, ran: Measured) -> Point:
    """The same with what was measured."""
    point = predicted_point(network, samples, role, ways, way)
    shares = point.ranks > num_cores()
    return replace(
        point,
        measured_s=ran.cpu_s if shares else ran.step_s,
        cpu_s=ran.cpu_s,
        wall_s=ran.step_s,
        layers=tuple(_layer_points(ways, way, ran)),
    )


def _layer_points(ways: Ways, way: Way, ran: Measured) -> Iterator[LayerPoint]:
    kinds = {layer.name: layer.kind for layer in ways.prices.layers}
    for rank, of_rank in enumerate(ran.ranks):
        expected = ways.per_layer(way, rank)
        for layer, (forward_s, backward_s) in of_rank.layer_s.items():
            one = expected[layer]
            yield LayerPoint(layer, kinds[layer], rank, "forward", one.forward_s, forward_s, one.is_measured)
            yield LayerPoint(layer, kinds[layer], rank, "backward", one.backward_s, backward_s, one.is_measured)


_WARM_UP = 2
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank saw, medians over steps.

    Attributes:
        step_s: from the common start to this rank's end.
        cpu_s: processor time of the process in a step, the moments in which it looks for a message included.
        loss: of the first step; nan on ranks that do not make it.
        layer_s: forward and backward of each layer, of other steps, in which every layer was timed.
    """

    step_s: float
    cpu_s: float
    loss: float
    layer_s: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, by rank."""

    ranks: tuple[Ran, ...]

    @property
    def step_s(self) -> float:
        """Of the slowest rank; means nothing where ranks share a core."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def cpu_s(self) -> float:
        """Of the busiest rank."""
        return max(rank.cpu_s for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the first step."""
        return next(rank.loss for rank in self.ranks if not math.isnan(rank.loss))


class Network(CapturedNetwork):
    """A network that is run divided over ranks of this machine."""

    def run(self, decision: Decision, steps: int, timed_steps: int = 0) -> Measured:
        """``steps`` training steps on ranks of their own, then ``timed_steps`` in which every layer is timed."""
        groups = groups_of(decision, self.captured.graph)

        def work(transport: Transport) -> Ran:
            return self._run(decision, transport, steps, timed_steps)

        return Measured(tuple(on_ranks(decision.num_ranks, work, groups, opened=open_shared)))

    def _run(self, decision: Decision, transport: Transport, steps: int, timed_steps: int) -> Ran:
        rows = decision.global_batch
        batch = tuple(tuple(x[:rows] for x in tensors) for tensors in (self.model.inputs, self.model.targets))
        told = {"model": self.captured, "module": self.model.module, "transport": transport}
        engine = Engine(RankContext(decision, sgd, **told))  # type: ignore[arg-type]
        seconds = []
        processor_s = []
        loss: float | None = None
        layer_s: Mapping[str, tuple[float, float]] = {}
        with no_collector():
            for step in range(_WARM_UP + steps):
                before_s = time.process_time()
                result = engine.step(*batch)
                if step >= _WARM_UP:
                    seconds.append(result.step_s)
                    processor_s.append(time.process_time() - before_s)
                loss = result.loss if step == 0 else loss
            if timed_steps:
                clock = LayerClock()
                with clock.watching():
                    watched = Engine(RankContext(decision, sgd, **told))  # type: ignore[arg-type]
                    for _ in range(_WARM_UP + timed_steps):
                        watched.step(*batch)
                        clock.next_step()
                layer_s = clock.medians(_WARM_UP)
        found = math.nan if loss is None else loss
        return Ran(statistics.median(seconds), statistics.median(processor_s), found, layer_s)


def require_equal_losses(losses: Mapping[str, float]) -> None:
    """Raises RuntimeError unless all ways of dividing a network compute the same loss."""
    first, expected = next(iter(losses.items()))
    for name, loss in losses.items():
        if abs(loss - expected) > _LOSS_TOLERANCE * abs(expected):
            raise RuntimeError(f"the loss is {expected} by {first}, and {loss} by {name}")


if __name__ == "__main__":
    hide_gpus()
    raise SystemExit(run("Strong scaling of layouts, predicted and measured", measure))
