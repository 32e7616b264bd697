"""Token slices (TeraPipe, Li et al., ICML 2021): its own models under the simulator, jobs beside one device, a clock.

*Predicted*, on p3.16xlarge (8 V100 a host, 25 Gbit/s), the machine of the paper, sequences of 2,048 tokens: blocks are
priced by :mod:`planner.extras.transformers` from tables of V100 kernels, a slice of l tokens behind c others with
scores of l x (c + l); messages leave by the host's card; embedding and head count for nothing.  The baseline is GPipe
with one sample a micro-batch, as in the paper.  Slices are by the planner's DP on a grid of 64 tokens.  The paper's
gain is printed where a source that we have says it: 5.0x for the 175B model (its abstract).  Pipeline stages, GPUs of a
stage and samples of a batch are those of the authors' scripts (github.com/zhuohan123/terapipe,
auto_latency_benchmark.sh and auto_mpirun_dp_slices_evaluation.sh); layers and widths are Brown et al.'s (2020), those
of the 44B model derived.

*Measured*: two ranks of this host, one sequence a step, the best plan with slices beside the best without.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.report import Row, at_least
from benchmarks.runs import simulated_s
from benchmarks.seeds.jobs import halopipe, largest_error
from benchmarks.turns import by_turns
from planner.extras.token_slices.search import SliceTimes, best_slices
from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.layers import layers_of
from planner.extras.transformers.shape import ParallelDegrees, Transformer
from planner.ir.box import Interval
from planner.ir.plan import sizes_of
from planner.ir.program import Message, Part
from planner.ir.schedule import COMPUTE, Action, Edge, Op, Pipeline, StageGraph
from planner.passes import lower
from planner.schedules import schedule

TOKENS = 2048
GRID = 32
_PART = (Part("x", (Interval(0, 1),), 4),)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of the paper on stages of ``tensor`` GPUs each.

    Attributes:
        published: times as fast as GPipe, in the paper; 0: no source of ours says it.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    stages: int
    tensor: int
    samples: int
    published: float = 0.0


SETTINGS = (
    Setting("GPT3-1B, 24 stages of 8", 24, 2048, 16, 24, 8, 72),
    Setting("GPT3-13B, 40 stages of 8", 40, 5120, 40, 40, 8, 32),
    Setting("GPT3-44B, 48 stages of 8", 96, 6144, 48, 48, 8, 16),
    Setting("GPT3-175B, 96 stages of 4", 96, 12288, 96, 96, 4, 2),
    Setting("GPT3-175B, 48 stages of 8", 96, 12288, 96, 48, 8, 2, 5.0),
)

MODEL = """
from profiler.models.{name} import {name}


def model():
    return {name}(input_shape=(16, 16), vocabulary=64, width=32, layers=2, heads=4)
"""

SEQUENCE = ["--arg", "vocabulary=256", "--arg", "width=256", "--arg", "layers=8", "--arg", "heads=4"]


def rows(quick: bool) -> Iterator[Row]:
    """All rows; quick ones leave out what a clock says."""
    yield from predicted()
    for name in ("gpt",) if quick else ("gpt", "llama"):
        slices = ["--token-slices", "7+5+4", "--schedule", "1f1b"]
        yield largest_error(f"TeraPipe, {name}", MODEL.format(name=name), ["--allow", "sample,time"], slices)
    if not quick:
        yield from measured()


def predicted() -> Iterator[Row]:
    """The step of GPipe over that with token slices, simulated."""
    for setting in SETTINGS:
        times = slice_times(setting)
        slices, _ = best_slices(times.both, setting.stages, setting.samples)
        gain = step_s(setting, (TOKENS,)) / step_s(setting, slices)
        name = f"TeraPipe, {setting.name}, batch {setting.samples}"
        if setting.published:
            yield at_least(f"{name}: predicted gain", gain, "x", setting.published)
            yield Row(f"{name}: published gain", setting.published, "x")
        else:
            yield Row(f"{name}: predicted gain", gain, "x")
        yield Row(f"{name}: slices", len(slices), "slices")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a stage by (start, stop) of a slice on the grid, and both together for the DP."""

    forward: dict[tuple[int, int], float]
    backward: dict[tuple[int, int], float]
    both: SliceTimes


@functools.cache
def slice_times(setting: Setting) -> Times:
    """Of all slices that begin and end on the grid."""
    points = tuple(TOKENS * k // GRID for k in range(GRID + 1))
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}
    seconds = np.full((GRID + 1, GRID + 1), np.inf)
    for a, start in enumerate(points):
        for b in range(a + 1, GRID + 1):
            ahead, back = _stage_s(setting, points[b] - start, start)
            forward[start, points[b]] = ahead
            backward[start, points[b]] = back
            seconds[a, b] = ahead + back
    return Times(forward, backward, SliceTimes(points, seconds))


def _stage_s(setting: Setting, length: int, before: int) -> tuple[float, float]:
    """Forward and backward of a stage's blocks, of one sample's slice of ``length`` tokens behind ``before`` others."""
    cluster = named_cluster("p3.16xlarge")
    heads = setting.heads // setting.tensor
    whole = Transformer(
        setting.name, setting.hidden, 4 * setting.hidden, setting.heads, setting.layers, 50257, length, dropout=False
    )
    block = layers_of(replace(whole, seq=length), cluster, ParallelDegrees(setting.tensor)).block
    ahead = block.forward.seconds
    back = block.backward.seconds
    if before:
        kernels = cluster.kernels
        size = whole.head_size
        square = kernels.gemm(length, before, size, heads).seconds
        thin = kernels.gemm(length, size, before, heads).seconds
        scores = heads * length * before
        ahead += square + thin + kernels.memory_bound(4.0 * scores, kind="softmax").seconds
        back += square + 3 * thin + kernels.memory_bound(6.0 * scores, kind="softmax_backward").seconds
    count = setting.layers / setting.stages
    return count * ahead, count * back


def step_s(setting: Setting, slices: tuple[int, ...]) -> float:
    """A step under GPipe, one sample a micro-batch, in these slices."""
    cluster = named_cluster("p3.16xlarge")
    times = slice_times(setting)
    p = setting.stages
    count = len(slices)
    sizes = sizes_of((1,) * setting.samples, slices)
    stages = StageGraph(p, len(sizes), tuple(Edge(s, s + 1, ("x",)) for s in range(p - 1)), parts=count)
    routes = {
        (edge.src, edge.dst, unit): (Message(edge.src, edge.dst, _PART, _PART),)
        for edge in stages.edges
        for unit in range(len(sizes))
    }
    program = lower(schedule("gpipe")(Pipeline(stages)), stages, tuple((s,) for s in range(p)), routes, p)
    ends = [(sum(slices[:k]), sum(slices[: k + 1])) for k in range(count)]
    by_op = {Op.FORWARD: times.forward, Op.BACKWARD: times.backward}

    def action_s(action: Action) -> float:
        return by_op[action.op][ends[(action.microbatch or 0) % count]] if action.op in COMPUTE else 0.0

    def transfer_s(route: tuple[int, int, int]) -> float:
        """Each GPU of a stage sends its part of the activations to its peer in the next; all of a host do at once."""
        return cluster.send(2.0 * slices[route[2] % count] * setting.hidden / setting.tensor, 8, 8).seconds

    return simulated_s(program, sizes, action_s, transfer_s)


def measured() -> Iterator[Row]:
    """Two ranks, one sequence of 512 tokens: steps of both plans, in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        halopipe(folder, "profile", "profiler.models.gpt:gpt", "--input", "1,512", *SEQUENCE, "--allow", "sample,time")
        plans = {"whole.json": "sample", "sliced.json": "sample,time"}
        for plan, allow in plans.items():
            options = ["--global-batch", "1", "--allow", allow, "--confidence", "0", "-o", plan]
            halopipe(folder, "plan", "profile.json", *options)

        def ran_s(plan: str) -> float:
            told = halopipe(folder, "run", plan, "--steps", "12", "--no-learn", "--no-check-first-step", "--json")
            return float(json.loads(told)["measured"]["step_s"])

        steps = by_turns(3, {plan: functools.partial(ran_s, plan) for plan in plans})
        sliced = json.loads((folder / "sliced.json").read_text())
        whole = json.loads((folder / "whole.json").read_text())
        predicted_gain = whole["prediction"]["step_s"] / sliced["prediction"]["step_s"]
        gain = statistics.median(steps["whole.json"]) / statistics.median(steps["sliced.json"])
        yield Row("TeraPipe, 2 ranks, one sequence of 512: predicted gain", predicted_gain, "x")
        yield at_least("TeraPipe, 2 ranks, one sequence of 512: measured gain, by the clock", gain, "x", 1.3)
