"""What a step costs beside forward and backward: adding up gradients, and the optimiser; and a whole step, to compare.

The optimiser runs with a learning rate of 0: the same work, and the model stays as it is.

By how much actions are longer after a wait.

What a host makes of coordinates ahead of a micro-batch, step by step: seconds, and the halos of shared sites.
"""

from __future__ import annotations

import difflib
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from cuda_ops.sparse.geometry import BuiltGeometry, Route
from cuda_ops.sparse.local import Owned, local_map
from cuda_ops.sparse.preparation import Clouds, Preparation
from cuda_ops.sparse.recipe import Passage
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.graph import Graph, graph_of_sites
from planner.ir.profile import Optimizer, ParameterCost, PreparationCost, SiteHalo
from planner.sites.arrangement import arrange, cut
from planner.sites.balance import halo_sites
from planner.sites.partition import BlockWork, Level
from planner.sites.prices import Pairs, network_work, prices
from profiler.capture.graph import Captured
from profiler.measure.noise import Clock, ThreadClock, timed
from profiler.measure.timing import Segment, SegmentedPass, run_pass, segments, trimmed_mean
from profiler.source.model import CloudExample, GraphExample, LoadedModel
from profiler.source.structure import BatchStructure

_WARM_UPS = 2  # the first makes the optimiser's state
_LONG_S = 3.0
_STAGES = 8
_WAIT_S = 2e-3
_WAITS_S = 1.5
_LEAST_PAIRS = 2


def still_optimizer(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The ``torch.optim`` optimiser, with a learning rate of 0.

    Raises:
        UnknownNameError, UsageError: there is no such optimiser, or it takes other arguments.
    """
    known = [name for name, value in vars(torch.optim).items() if isinstance(value, type) and name != "Optimizer"]
    if optimizer.name not in known:
        near = difflib.get_close_matches(optimizer.name, known, n=1)
        raise UnknownNameError(
            f"torch.optim has no optimiser {optimizer.name!r}",
            [f"known: {', '.join(sorted(known))}"],
            [f"did you mean {name}?" for name in near],
        )
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer.name)
    rate = {"lr": 0.0} if "lr" in inspect.signature(cls).parameters else {}
    try:
        return cls(parameters, **{**optimizer.arguments, **rate})
    except (TypeError, ValueError) as error:
        raise UsageError(f"torch.optim.{optimizer.name} refuses its arguments", [str(error)]) from None


def parameter_costs(
    captured: Captured, optimizer: Optimizer, num_runs: int, clock: Clock | None = None
) -> dict[str, ParameterCost]:
    """The costs of each layer that has parameters; tied parameters count for the first layer that uses them.

    The updates of all layers add up to what one optimiser for all takes.

    Args:
        clock: of the device that the parameters are on; by default that of the processor.
    """
    clock = clock or ThreadClock()
    parts = _owners(captured)
    if not parts:
        return {}
    for part in parts.values():
        for parameter in part:
            parameter.grad = torch.full_like(parameter, 1e-3)
    accumulate_s = _accumulate_s(parts, num_runs, clock)
    update_s = _update_s(parts, optimizer, num_runs, clock)
    for part in parts.values():
        for parameter in part:
            parameter.grad = None
    return {name: ParameterCost(accumulate_s[name], update_s[name]) for name in parts}


def iteration_s(
    model: LoadedModel,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
    optimizer: Optimizer,
    num_runs: int,
    clock: Clock | None = None,
) -> float:
    """Seconds of a whole step on the user's own module: forward, backward, update.

    ``inputs`` and ``targets`` are what the module and its loss take (:meth:`LoadedModel.taken`).

    Args:
        num_runs: steps that count; fewer, but one, of those that take long: ``_LONG_S`` in all are enough.
        clock: of the device that the model is on; by default that of the processor.
    """
    clock = clock or ThreadClock()
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    update = still_optimizer(optimizer, parameters) if parameters else None

    def step() -> None:
        model.loss_of_taken(inputs, targets).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        if update is not None:
            update.step()
            update.zero_grad(set_to_none=True)

    times: list[float] = []
    while len(times) < num_runs + _WARM_UPS and (len(times) <= _WARM_UPS or sum(times) < _LONG_S):
        gc.collect()
        gc.disable()
        try:
            times.append(timed(clock, step))
        finally:
            gc.enable()
    return trimmed_mean(times[_WARM_UPS:])


def action_overhead_s(
    captured: Captured, tensors: Mapping[str, Tensor], samples: int, num_runs: int, clock: Clock | None = None
) -> float | None:
    """Seconds by which an action that follows a wait exceeds its layers: code and data have left the caches meanwhile.

    The network is cut into stages with as many operators each. Passes in which every F and every B waits first are run
    by turns with passes in which none does, as layers are timed; the median over actions of the median difference.
    Short actions tell it best, as what disturbs them grows with their length: give the fewest ``samples``.

    Args:
        tensors: the graph's inputs by name.
        num_runs: pairs of passes; fewer, but two, of those that take long (``_WAITS_S`` in all).
        clock: as of :func:`iteration_s`.

    Returns:
        None beside an accelerator, where the host's calls run ahead of the kernels.
    """
    if clock is not None and not isinstance(clock, ThreadClock):
        return None
    stages = _stages(segments(captured), _STAGES)
    longer: dict[tuple[str, bool], list[float]] = {}
    started_s, runs = time.monotonic(), 0
    while runs < num_runs and (runs < _LEAST_PAIRS or time.monotonic() - started_s < _WAITS_S):
        pair = [
            run_pass(stages, lambda _: SegmentedPass(captured, tensors, samples, clock), False, wait)
            for wait in (None, _wait)
        ]
        for name, (forward_s, backward) in pair[1].items():
            before_s, before = pair[0][name]
            longer.setdefault((name, False), []).append(forward_s - before_s)
            if before.both_s > 0:
                longer.setdefault((name, True), []).append(backward.both_s - before.both_s)
        runs += 1
    return max(0.0, statistics.median(map(statistics.median, longer.values()))) if longer else None


def _wait() -> None:
    """As an executor waits: it looks again and again."""
    stop_s = time.perf_counter() + _WAIT_S
    while time.perf_counter() < stop_s:
        pass


def _stages(parts: Sequence[Segment], number: int) -> tuple[Segment, ...]:
    """Neighbouring layers as one, so that autograd goes through them in one call; by their numbers of operators."""
    groups: list[list[Segment]] = [[] for _ in range(number)]
    total, so_far = sum(len(part.calls) for part in parts), 0
    for part in parts:
        groups[so_far * number // max(total, 1)].append(part)
        so_far += len(part.calls)
    return tuple(_as_one(group) for group in groups if group)


def _as_one(group: Sequence[Segment]) -> Segment:
    calls = tuple(node for part in group for node in part.calls)
    own = set(calls)
    reads = dict.fromkeys(node for part in group for node in part.reads if node not in own)
    return Segment(
        group[0].name,
        calls,
        tuple(reads),
        tuple(node for part in group for node in part.results),
        tuple(parameter for part in group for parameter in part.parameters),
    )


def _owners(captured: Captured) -> dict[str, tuple[nn.Parameter, ...]]:
    seen: set[int] = set()
    found: dict[str, tuple[nn.Parameter, ...]] = {}
    for part in segments(captured):
        own = tuple(parameter for parameter in _distinct(part) if id(parameter) not in seen)
        seen.update(map(id, own))
        if own:
            found[part.name] = own
    return found


def _distinct(part: Segment) -> tuple[nn.Parameter, ...]:
    return tuple({id(parameter): parameter for parameter in part.parameters}.values())


@torch.no_grad()
def _accumulate_s(parts: Mapping[str, tuple[nn.Parameter, ...]], num_runs: int, clock: Clock) -> dict[str, float]:
    fresh = {name: [torch.zeros_like(parameter) for parameter in part] for name, part in parts.items()}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(num_runs + 1):
        laps = {}
        for name in reversed(list(parts)):  # the order of backward
            sums = [cast("Tensor", parameter.grad) for parameter in parts[name]]  # each has one: parameter_costs
            started = clock.start()
            for total, gradient in zip(sums, fresh[name], strict=True):
                total.add_(gradient)
            laps[name] = clock.stop(started)
        clock.settle()
        for name, lap in laps.items():
            times[name].append(clock.seconds(lap))
    return {name: trimmed_mean(values[1:]) for name, values in times.items()}


def _update_s(
    parts: Mapping[str, tuple[nn.Parameter, ...]], optimizer: Optimizer, num_runs: int, clock: Clock
) -> dict[str, float]:
    """Each layer's own optimiser tells the shares, one optimiser for all the sum: a call costs something, too."""
    own = {name: still_optimizer(optimizer, part) for name, part in parts.items()}
    shares: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(num_runs + 1):
        for name, update in own.items():
            shares[name].append(timed(clock, update.step))
    own.clear()
    whole = still_optimizer(optimizer, [parameter for part in parts.values() for parameter in part])
    total_s = trimmed_mean([timed(clock, whole.step) for _ in range(num_runs + 1)][1:])
    device = next(iter(parts.values()))[0].device
    call_s = timed(clock, still_optimizer(optimizer, [nn.Parameter(torch.zeros(1, device=device))]).step)
    net = {name: max(0.05 * call_s, trimmed_mean(values[1:]) - call_s) for name, values in shares.items()}
    scale = total_s / sum(net.values())
    return {name: value * scale for name, value in net.items()}


PARTS = (2, 3, 4, 8)
"""Numbers of ranks for which halos are counted; others follow from them."""
_NUM_RUNS = 5
_COLLATE, _SAMPLE = "collate", "sample"


def preparation_costs(
    graph: Graph, example: CloudExample, raw: tuple[Tensor, ...], samples: int
) -> tuple[PreparationCost, ...]:
    """Thread CPU seconds of each step, of the ``samples`` clouds in ``raw``: medians of a few runs.

    A site set comes after the one that it is made of, a map after its ends.  What sharing sites costs on top is
    measured for two ranks: the order of the sites, and what a rank does with each map.
    """
    preparation = example.preparation
    words = preparation.size_of
    inputs = dict(zip(preparation.names, _names(preparation), strict=True))
    runs = [_timed(graph, preparation, raw) for _ in range(_NUM_RUNS)]
    seconds = {name: trimmed_mean([run[name] for run in runs]) for name in runs[0]}
    shares = [_timed_shares(graph, preparation, raw) for _ in range(_NUM_RUNS)]
    shared = {name: trimmed_mean([run[name] for run in shares]) for name in shares[0]}
    found = [PreparationCost(_COLLATE, (inputs["lengths"],), (), seconds[_COLLATE], samples, shared[_COLLATE])]
    for route, word in words.items():
        if route:
            parent = words[route[:-1]] if route[:-1] else _COLLATE
            found.append(PreparationCost(word, (), (parent,), seconds[word], samples))

    def level(route: Route) -> str:
        return words[route] if route else _COLLATE

    for index, spec in enumerate(preparation.recipe.maps):
        made = inputs[f"neighbours_{index}"], inputs[f"reverse_{index}"]
        after = tuple(dict.fromkeys((level(spec.source), level(spec.target))))
        name = f"map_{index}"
        found.append(PreparationCost(name, made, after, seconds[name], samples, shared[name]))
    for index, route in enumerate(preparation.recipe.segments):
        made = inputs[f"starts_{index}"], inputs[f"lengths_{index}"]
        found.append(PreparationCost(f"segments_{index}", made, (level(route),), seconds[f"segments_{index}"], samples))
    return tuple(found)


def sampling_cost(graph: Graph, example: GraphExample, raw: tuple[Tensor, ...], samples: int) -> PreparationCost:
    """Thread CPU seconds of sampling the neighbours of ``samples`` seeds, and of copying their features."""
    made = tuple(graph.inputs)[: example.preparation.num_inputs]
    seconds = []
    for draw in range(_NUM_RUNS + 1):
        start_s = time.thread_time()
        example.preparation.prepared((raw[0], torch.full_like(raw[1], draw), *raw[2:]))
        seconds.append(time.thread_time() - start_s)
    return PreparationCost(_SAMPLE, made, (), trimmed_mean(seconds[1:]), samples, is_beside=True)


def site_halos(graph: Graph, example: CloudExample, raw: tuple[Tensor, ...], samples: int) -> tuple[SiteHalo, ...]:
    """Rows that each sparse layer exchanges, where equal ranks share the sites of the clouds in ``raw``."""
    preparation = example.preparation
    clouds, words = preparation.clouds(raw), preparation.size_of
    known = _passages(clouds)
    levels, work = _work(graph, clouds)
    halos = []
    for parts in PARTS:
        owners = _owner_of_sites(levels, work, parts)
        counted: dict[str, int] = {}
        for layer in graph.layers:
            name = next((value for value in layer.inputs[1:] if value in known), None)
            if name is None or "pairs" not in layer.attributes:
                continue
            if name not in counted:
                found = known[name]
                ends = owners[words[found.source]], owners[words[found.target]]
                rows = halo_sites(*ends, found.kernel_map.neighbours.numpy(), parts)
                counted[name] = int(rows.sum(0).max(initial=0))
            halos.append(SiteHalo(layer.name, parts, samples, counted[name]))
    return tuple(halos)


def _names(preparation: Preparation) -> tuple[str, ...]:
    return BatchStructure.plain(preparation.num_inputs, len(preparation.per_site)).names


def _timed(graph: Graph, preparation: Preparation, raw: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of each step; with ``collate``, the graph of so many sites, which every micro-batch is run by."""
    seconds: dict[str, float] = {}

    def timed(name: str, make: Callable[[], object]) -> object:
        start_s = time.thread_time()
        found = make()
        seconds[name] = time.thread_time() - start_s
        return found

    made: list[Clouds] = []
    timed(_COLLATE, lambda: made.append(_collated(preparation, raw)))
    geometry: BuiltGeometry = made[0].geometry
    for route, word in preparation.size_of.items():
        if route:
            timed(word, partial(geometry.keys, route))
    start_s = time.thread_time()
    graph_of_sites(graph, made[0].num_samples, made[0].sizes)
    seconds[_COLLATE] += time.thread_time() - start_s
    for index, spec in enumerate(preparation.recipe.maps):
        timed(f"map_{index}", partial(geometry.map, spec))
    for index, route in enumerate(preparation.recipe.segments):
        timed(f"segments_{index}", partial(geometry.segments, route))
    return seconds


def _timed_shares(graph: Graph, preparation: Preparation, raw: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of arranging the clouds (under ``collate``), and of each map's part on the first of two ranks."""
    clouds, words = preparation.clouds(raw), preparation.size_of
    for spec in preparation.recipe.maps:
        clouds.map(spec)
    start_s = time.thread_time()
    owners = _owner_of_sites(*_work(graph, clouds), 2)
    seconds = {_COLLATE: time.thread_time() - start_s}
    owned = {route: Owned.by(torch.from_numpy(owners[word]), 0) for route, word in words.items()}
    for index, spec in enumerate(preparation.recipe.maps):
        start_s = time.thread_time()
        local_map(clouds.map(spec), owned[spec.source], owned[spec.target]).split()
        seconds[f"map_{index}"] = time.thread_time() - start_s
    return seconds


def _collated(preparation: Preparation, raw: tuple[Tensor, ...]) -> Clouds:
    clouds = preparation.clouds(raw)
    clouds.tensor("features")
    return clouds


def _work(graph: Graph, clouds: Clouds) -> tuple[dict[str, Level], BlockWork]:
    """The site sets by name, and what the network costs on each block of them."""
    words = clouds.preparation.size_of
    pairs = {}
    for name, found in _passages(clouds).items():
        counts = found.kernel_map.pairs_of_inputs().numpy(), found.kernel_map.pairs_of_outputs().numpy()
        pairs[name] = Pairs(words[found.source], words[found.target], *counts)
    levels = {word: Level(*clouds.level(route)) for route, word in words.items()}
    return levels, network_work(levels, pairs, prices(graph))


def _owner_of_sites(levels: Mapping[str, Level], work: BlockWork, parts: int) -> dict[str, Any]:
    """Who owns each site of each level, where ``parts`` equal ranks share them; by the level's name."""
    speeds = (1.0,) * parts
    owned = cut(arrange(work, speeds), speeds)
    return {word: owned.owner(each.samples, each.coordinates, each.stride) for word, each in levels.items()}


def _passages(clouds: Clouds) -> dict[str, Passage]:
    """By the graph input that a layer takes as neighbours, what it then goes through."""
    preparation = clouds.preparation
    own = zip(_names(preparation), preparation.names, strict=True)
    found = ((name, preparation.recipe.passage(clouds, each)) for name, each in own)
    return {name: each for name, each in found if each is not None}
