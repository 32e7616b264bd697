"""How far a step may lie from its prediction: the step replayed with costs drawn anew, a few hundred times.

    runs measured                 of each rank one of the processes that measured: what is common to all that it does in
                                  a step.  Of each action one of that process' passes over the network: what is its own;
                                  all layers of the action from the same pass.  Passes that follow one another are alike
                                  to some degree: the part ``drift`` of their variance (their autocorrelation) is
                                  common too, and comes from one pass for all actions of the rank
    only their spread             normal with that interquartile range, once for each rank: nothing averages out
    what the model leaves out     a factor of the whole step, once: normal in its logarithm, median 1, with the standard
                                  deviation that runs of plans of that kind have shown (``costs.calibration.fit``), or
                                  else that of ``MODEL``
    not measured at that size     a factor for each kind of layer on each kind of device, once: median 1, its first and
                                  last decile at ``SizeTable.low`` and ``high``

What is drawn scales the part of an action in which layers compute; a message's time, sums of gradients, updates and
what sharing adds stay as they are (``simulator.replay``).  Ignored besides: noise of links; ranges of layers with
layouts of their own.  The same inputs draw the same numbers.  Noise makes whoever waits for several others wait longer,
so that the median of the draws is often above the step that is simulated without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from planner.costs.cost_model import CostModel
from planner.costs.layers.confidence import CostNoise, MeasuredNoise
from planner.costs.layers.cost_table import layers_of
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram
from planner.costs.simulator.replay import Draws, replayed
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import StagePlacement
from planner.costs.timeline import Trace
from planner.ir.plan import samples_in
from planner.ir.profile import ONE_DEVICE, PIPELINE, SHARING, STEP_RANGE, CostClass
from planner.ir.schedule import COMPUTE

DRAWS = 200

MODEL: Mapping[str, float] = {ONE_DEVICE: 0.055, PIPELINE: 0.085, SHARING: 0.11}
"""Standard deviation of log(measured / predicted) by kind of plan, as long as no run has shown it: with these, and with
the profile's own scatter, the ranges of 90 plans of 14 networks (``python -m benchmarks.accuracy``) hold 87 % of the
measured medians, without them 39 %.  Found from all networks but one in turn they hold 87 % of those left out."""

_SEED = 20
_OF_MODEL = 1
_DIGITS = 6
_DECILE = 1.2815515655446004  # of the normal distribution, in standard deviations


@dataclass(frozen=True, slots=True)
class Deciles:
    """The first decile of the step, its median and its last."""

    p10_s: float
    p50_s: float
    p90_s: float


def kind_of(stages: Sequence[Sequence[int]]) -> str:
    """The kind of a plan whose stages have these ranks."""
    if any(len(ranks) > 1 for ranks in stages):
        return SHARING
    return PIPELINE if len(stages) > 1 else ONE_DEVICE


def model_deviation(cost_model: CostModel, kind: str, assumed: Mapping[str, float] | None = None) -> float:
    """Standard deviation of log(measured / predicted) of plans of a kind: as runs have shown, or else as assumed.

    Args:
        assumed: by kind; None: ``MODEL``.
    """
    return log(cost_model.excess.factors.known.get(CostClass(STEP_RANGE, kind), exp((assumed or MODEL)[kind])))


def _of_model(costs: StageCosts, num_draws: int) -> Draws:
    """What the step is multiplied by for what the model leaves out."""
    deviation = model_deviation(costs.cost_model, kind_of([stage.ranks for stage in costs.stages]))
    factors: Draws = np.exp(deviation * np.random.default_rng((_SEED, _OF_MODEL)).standard_normal(num_draws))
    return factors


def deciles(
    compiled: CompiledProgram, costs: StageCosts, prices: SlotPrices, trace: Trace, num_draws: int = DRAWS
) -> Deciles:
    """Of the step that ``trace`` is without noise."""
    noises = _noises(compiled, costs)
    if not noises:
        return Deciles(trace.step_s, trace.step_s, trace.step_s)
    factors = _factors(compiled, costs, prices, noises, num_draws)
    return deciles_of(replayed(compiled, prices, trace, factors, num_draws), costs)


def paired_steps(
    compiled: CompiledProgram, costs: StageCosts, prices: SlotPrices, trace: Trace, num_draws: int
) -> Draws:
    """What a step takes on average over many, by draw; draws of two plans of a profile may be held against one another.

    A rank's process, its pass in common, and the factor of layers of a kind on a kind of device are the same in a draw,
    whatever the plan.  What is an action's own averages out over steps, and is left out.
    """
    noises = _noises(compiled, costs)
    drawn = _Paired(len(compiled.rows), num_draws)
    return replayed(compiled, prices, trace, _factors(compiled, costs, prices, noises, num_draws, drawn), num_draws)


def deciles_of(draws: Draws, costs: StageCosts) -> Deciles:
    """Of draws of a step, with what the model leaves out."""
    drawn = draws * _of_model(costs, len(draws))
    low, middle, high = (float(f"{np.quantile(drawn, at):.{_DIGITS}g}") for at in (0.1, 0.5, 0.9))
    return Deciles(low, middle, high)


def keyed(key: str) -> np.random.Generator:
    """Random numbers that depend on the key alone."""
    return np.random.default_rng((_SEED, crc32(key.encode())))


def varies(costs: StageCosts) -> bool:
    """Whether any computing of the stages varies."""
    measured = MeasuredNoise(costs.cost_model.profile)
    parts = {
        (number, costs.kind(rank), placed.samples_of(member, size))
        for number, placed in enumerate(costs.stages)
        for size in map(samples_in, set(costs.micro_batches))
        for member, rank in enumerate(placed.ranks)
    }
    return any(_noise(measured, costs, costs.stages[number], kind, n).varies for number, kind, n in parts)


def _noises(compiled: CompiledProgram, costs: StageCosts) -> dict[int, CostNoise]:
    """Of each action that varies; the same for all of a stage on one kind of device at as many samples."""
    measured = MeasuredNoise(costs.cost_model.profile)
    noise_of: dict[tuple[int, str, float], CostNoise] = {}
    noises = {}
    for number, slot in enumerate(compiled.actions):
        if slot.action.op not in COMPUTE:
            continue
        placed = costs.stages[slot.action.stage]
        size = samples_in(costs.micro_batches[slot.action.microbatch or 0])
        samples = placed.samples_of(placed.ranks.index(slot.rank), size)
        key = (slot.action.stage, costs.kind(slot.rank), samples)
        if key not in noise_of:
            noise_of[key] = _noise(measured, costs, placed, *key[1:])
        if noise_of[key].varies:
            noises[number] = noise_of[key]
    return noises


def _factors(
    compiled: CompiledProgram,
    costs: StageCosts,
    prices: SlotPrices,
    noises: Mapping[int, CostNoise],
    num_draws: int,
    drawn: _Drawn | None = None,
) -> dict[tuple[int, int], Draws]:
    """By (rank, position), what its time is multiplied by."""
    drawn = drawn or _Drawn(np.random.default_rng(_SEED), len(compiled.rows), num_draws)
    for number, noise in sorted(noises.items()):
        for kind, *_ in noise.ranges:
            key = costs.kind(compiled.actions[number].rank), kind
            drawn.alike.setdefault(key, drawn.normals(key))
    factors = {}
    for rank, row in enumerate(compiled.rows):
        for position, (_, number, _) in enumerate(row):
            action = compiled.grid[rank][position]
            if action.op in COMPUTE and number in noises:
                factor = drawn.factor(rank, costs.kind(rank), noises[number])
                seconds = prices.action_s[number]
                computing = max(0.0, 1 - costs.exchange_s(action) / seconds) if seconds > 0 else 0.0
                factors[rank, position] = 1 + computing * (factor - 1)
    return factors


class _Drawn:
    """Numbers drawn: of each rank its process, its common pass, its place in a normal one; of layers alike theirs."""

    def __init__(self, draw: np.random.Generator, num_ranks: int, num_draws: int) -> None:
        self.draw = draw
        self.num_draws = num_draws
        self.process = [draw.random(num_draws) for _ in range(num_ranks)]
        self.steady = [draw.random(num_draws) for _ in range(num_ranks)]
        self.normal = [draw.standard_normal(num_draws) for _ in range(num_ranks)]
        self.alike: dict[tuple[str, str], Draws] = {}

    def factor(self, rank: int, kind: str, noise: CostNoise) -> Draws:
        """What multiplies the computing of one action; none is below 0."""
        factor = 1 + noise.spread * self.normal[rank]
        if noise.measured > 0:
            number, length = noise.passes.shape
            process = (self.process[rank] * number).astype(np.int64)
            common = noise.passes[process, (self.steady[rank] * length).astype(np.int64)]
            moved = sqrt(1 - noise.drift) * self.own(noise.passes, process) + sqrt(noise.drift) * common
            factor += noise.measured * (noise.levels[process] + moved - 1)
        for of, part, low, high in noise.ranges:
            factor += part * (_ranged(self.alike[kind, of], low, high) - 1)
        return np.maximum(factor, 0.0)

    def normals(self, _key: tuple[str, str]) -> Draws:
        """Of layers alike."""
        return self.draw.standard_normal(self.num_draws)

    def own(self, passes: Draws, process: NDArray[np.int64]) -> Draws:
        """What is one action's own, of the process drawn."""
        draws: Draws = passes[process, self.draw.integers(passes.shape[1], size=self.num_draws)]
        return draws


class _Paired(_Drawn):
    """The same numbers for every plan."""

    def __init__(self, num_ranks: int, num_draws: int) -> None:
        super().__init__(keyed("own"), 0, num_draws)
        ranks = range(num_ranks)
        self.process = [keyed(f"process {rank}").random(num_draws) for rank in ranks]
        self.steady = [keyed(f"steady {rank}").random(num_draws) for rank in ranks]
        self.normal = [keyed(f"normal {rank}").standard_normal(num_draws) for rank in ranks]

    def normals(self, key: tuple[str, str]) -> Draws:
        return keyed(f"alike {key}").standard_normal(self.num_draws)

    def own(self, passes: Draws, process: NDArray[np.int64]) -> Draws:
        return np.zeros(self.num_draws)


def _ranged(normal: Draws, low: float, high: float) -> Draws:
    """Factors around 1 with these deciles."""
    down = -log(max(low, 1e-6))
    up = log(max(high, 1.0))
    exponents: Draws = np.exp(normal / _DECILE * np.where(normal < 0, max(0.0, down), up))
    return exponents


def _noise(measured: MeasuredNoise, costs: StageCosts, placed: StagePlacement, kind: str, samples: float) -> CostNoise:
    """From the measurements, nearest in size, of a stage's layers."""
    nearest = measured.nearest(kind, layers_of(placed.runs), samples) if samples > 0 else {}
    weights = {index: measurement.passes_s for index, measurement in nearest.items()}
    ranges = () if placed.laid_out else tuple(_ranges(costs, kind, samples, weights))
    return measured.noise(kind, nearest, weights, ranges)


def _ranges(
    costs: StageCosts, kind: str, samples: float, weights: Mapping[int, float]
) -> Iterator[tuple[str, float, float, float]]:
    """Of layers that were not measured at that size, those of a kind together."""
    total_s = sum(weights.values())
    if total_s <= 0:
        return
    table = costs.cost_model.tables.at(kind, samples)
    layers = costs.cost_model.graph.layers
    by_kind: dict[str, list[tuple[float, float, float]]] = {}
    for index, seconds in weights.items():
        low = float(table.low[index])
        high = float(table.high[index])
        if seconds > 0 and (low < 1 or high > 1):
            by_kind.setdefault(layers[index].kind, []).append((seconds, low, high))
    for name, of_kind in sorted(by_kind.items()):
        seconds = sum(one for one, _, _ in of_kind)
        low, high = (sum(each[0] * each[at] for each in of_kind) / seconds for at in (1, 2))
        yield name, seconds / total_s, low, high
