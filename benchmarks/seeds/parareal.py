"""Parareal networks: the fine blocks of all time slices side by side.

Lions, Maday and Turinici 2001; as networks Lee, Park and Lee 2022 (``profiler.models.parareal``).  A pass of N slices
takes N fine blocks one after another where each stage waits for the one before it, and one where they run side by side,
with a sweep of predictions before and one of corrections behind.  Let g, f and d be the forward of all predictions, of
a fine block and of all corrections, a backward twice that, and 3 d <= f.  On N + 2 stages 1F1B takes

                          one micro-batch           m > 1 micro-batches
    side by side          3 (g + f + d)             3 (g + m f)
    one after another     3 (g + N f + d)           3 (g + (m + N - 1) f)

- *Closed form*: their ratio; *predicted*: the simulator's, with free messages; they are one number.
- *Planned*: the best plan on N + 2 devices, by the search, over the best one whose stages are a chain.
- *Executed*: two ranks, the predictions and the second fine block on one, the first fine block and the corrections on
  the other, held against one device; and how much of the shorter fine block's forward the other runs beside it, as
  planned and as measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.report import Row
from benchmarks.seeds.branches import best_of_these, best_plan, builder, profile_of, with_loss
from benchmarks.seeds.jobs import error_of, folder_of, halopipe
from benchmarks.seeds.schedules import graph_step_s
from planner import predict
from planner.costs.candidate import Candidate
from planner.ir.codec import dump, load
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.schedule import Edge, StageGraph
from planner.ir.timeline import Timeline, TimelineFile

MODEL = """
from profiler.models.parareal import parareal


def model():
    return parareal(input_shape=(16, 3, 16, 16), slices=2, steps=6, width=8)
"""


def rows(quick: bool) -> Iterator[Row]:
    """All rows."""
    for slices in (2, 4, 8):
        for num_microbatches in (1, 8):
            yield from predicted(slices, num_microbatches)
    yield planned(2 if quick else 4)
    yield from executed()


def predicted(slices: int, num_microbatches: int, fine: float = 32.0) -> Iterator[Row]:
    """What is arithmetic; a prediction or correction of a slice takes 1."""
    coarse = float(slices - 1)
    forward = (coarse, *(fine,) * slices, coarse)
    beside, row = (_step_s(slices, num_microbatches, forward, is_chain=chain) for chain in (False, True))
    ends = 2 * coarse if num_microbatches == 1 else coarse  # of several, corrections are made beside fine blocks
    closed = (ends + (num_microbatches + slices - 1) * fine) / (ends + num_microbatches * fine)
    name = f"Parareal, {slices} slices, {_count(num_microbatches)}"
    gain = row / beside
    yield Row(f"{name}: predicted gain", gain, "x", f"{closed:.6g}", abs(gain - closed) <= 1e-9 * closed)
    yield Row(f"{name}: closed form", closed, "x")


def _count(num_microbatches: int) -> str:
    return f"{num_microbatches} micro-batch{'es' if num_microbatches > 1 else ''}"


def _step_s(slices: int, num_microbatches: int, forward: tuple[float, ...], *, is_chain: bool) -> float:
    count = len(forward)
    edges = {(0, slot) for slot in range(1, count)} | {(slot, count - 1) for slot in range(count - 1)}
    if is_chain:
        edges |= {(stage, stage + 1) for stage in range(count - 1)}
    graph = StageGraph(count, num_microbatches, tuple(Edge(*edge, ("x",)) for edge in sorted(edges)))
    return graph_step_s("1f1b", graph, range(count), forward, tuple(2 * each for each in forward))


@dataclass(frozen=True, slots=True)
class Slices:
    """A parareal network of pointwise layers.

    Attributes:
        slices, steps: of time, and layers of a fine block; predictions and corrections have one layer a slice.
        features, layer_s: as of :class:`benchmarks.seeds.branches.Network`.
    """

    slices: int
    steps: int = 6
    features: int = 4096
    layer_s: float = 2e-5

    def graph(self, *, is_chain: bool) -> Graph:
        """As a chain, each layer also waits for the one before it."""
        layers, add = builder(self.features, is_chain=is_chain)
        starts = [add("open", ("x",))]
        for number in range(self.slices - 1):
            starts.append(add(f"predict{number}", (starts[-1],)))
        ends = []
        for number, last in enumerate(starts):
            for step in range(self.steps):
                last = add(f"fine{number}.{step}", (last,))
            ends.append(last)
        found = ends[0]
        for number, (start, end) in enumerate(zip(starts[1:], ends[1:], strict=True)):
            found = add(f"correct{number}", (found, start, end))
        return with_loss(layers, found, self.features)

    def profile(self, *, is_chain: bool, num_devices: int) -> Profile:
        """On devices of 32 GB with links of 12 GB/s."""
        return profile_of(self.graph(is_chain=is_chain), self.features, self.layer_s, num_devices)


def planned(slices: int) -> Row:
    """The best plan over the best chain, or over the bound of that where its search was cut short."""
    best, chain = (
        best_plan(Slices(slices), (64,), is_chain=each, num_devices=slices + 2, limit_s=30.0) for each in (False, True)
    )
    least_s = min(chain.search.bound_s, chain.prediction.step_s)
    name = f"Parareal, {slices} slices, {slices + 2} devices, 2 micro-batches, planned: gain over the best chain"
    return Row(name, least_s / best.prediction.step_s, "x")


def executed() -> Iterator[Row]:
    """A job of two workers beside one device."""
    with folder_of(MODEL) as folder:
        halopipe(folder, "profile", "model.py:model", "--quick", "--dtype", "float64")
        profile = load(folder / "profile.json", Profile)
        plan = side_by_side(profile, 2)
        dump(plan, folder / "plan.json")
        told = halopipe(folder, "run", "plan.json", "--steps", "6", "--check-numerics", "--json")
        yield error_of("Parareal", told)
        for word, timeline in (
            ("predicted", predict(profile, plan.decision)[1]),
            ("executed", load(folder / "timeline.json", TimelineFile).measured),
        ):
            yield Row(f"Parareal, {word}: fine blocks side by side", 100 * beside(timeline, "1F", "2F"), "%")


def side_by_side(profile: Profile, slices: int, batch: int = 16, micro_batch: int = 16) -> Plan:
    """Predictions, each fine block, and corrections as stages; stage s is on rank s modulo the slices."""
    parts = [f"1.fine.{number}." for number in range(slices)]
    stage_of = []
    last = 0
    for layer in profile.graph.layers:
        last = next((1 + number for number, part in enumerate(parts) if layer.name.startswith(part)), last)
        if last and not layer.name.startswith("1.fine."):
            last = slices + 1
        stage_of.append(last)
    groups = tuple((stage % slices,) for stage in range(slices + 2))
    shares = ((micro_batch,),) * len(groups)
    sizes = (micro_batch,) * (batch // micro_batch)
    candidate = Candidate(tuple(stage_of), groups, shares, sizes, "greedy")
    problem = Problem(profile, batch, schedules=("greedy",), micro_batch_sizes=(micro_batch,))
    return best_of_these(problem, lambda *_: [candidate], "by hand", "predictions, fine blocks and corrections")


def beside(timeline: Timeline, one: str, other: str) -> float:
    """The share of the actions that begin with ``one`` in which an action of ``other`` runs too."""
    spans, others = (
        [(span.start_s, span.stop_s) for span in timeline.spans if span.action.startswith(word)]
        for word in (one, other)
    )
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)
    least = min(sum(b - a for a, b in each) for each in (spans, others))
    return both / least if least > 0 else 0.0
