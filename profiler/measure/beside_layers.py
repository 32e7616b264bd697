"""What a step costs beside forward and backward: adding up gradients, and the optimiser; and a whole step, to compare.

The optimiser runs with a learning rate of 0: the same work, and the model stays as it is.

By how much actions are longer after a wait.
"""

from __future__ import annotations

import difflib
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer, ParameterCost
from profiler.measure.contention import trimmed_mean
from profiler.measure.noise import LapClock, ThreadClock, timed
from profiler.measure.timing import LayerSegment, SegmentedPass, run_pass, segments
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule

_WARM_UPS = 2  # the first makes the optimiser's state, and is enough where it takes long
_LONG_S = 2.0
_STAGES = 8
_WAIT_S = 2e-3
_WAITS_S = 1.5


def still_optimizer(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The ``torch.optim`` optimiser, with a learning rate of 0.

    Raises:
        UnknownNameError, UsageError: there is no such optimiser, or it takes other arguments.
    """
    names = [name for name, value in vars(torch.optim).items() if isinstance(value, type) and name != "Optimizer"]
    if optimizer.name not in names:
        near = difflib.get_close_matches(optimizer.name, names, n=1)
        raise UnknownNameError(
            f"torch.optim has no optimiser {optimizer.name!r}",
            [f"known: {', '.join(sorted(names))}"],
            [f"did you mean {name}?" for name in near],
        )
    cls: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer.name)
    rate = {"lr": 0.0} if "lr" in inspect.signature(cls).parameters else {}
    try:
        return cls(parameters, **{**optimizer.arguments, **rate})
    except (TypeError, ValueError) as error:
        raise UsageError(f"torch.optim.{optimizer.name} refuses its arguments", [str(error)]) from None


def parameter_costs(
    captured: CapturedModule, optimizer: Optimizer, num_runs: int, clock: LapClock | None = None
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


class StepSeconds(NamedTuple):
    """Of a whole step: forward and backward, and all of it."""

    passes_s: float
    whole_s: float


def step_seconds(
    model: LoadedModel,
    batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    optimizer: Optimizer,
    num_runs: int,
    clock: LapClock | None = None,
    *,
    has_run: bool = False,
) -> StepSeconds:
    """A whole step on the user's own module: forward, backward, update.

    Args:
        batch: inputs and targets, as :meth:`LoadedModel.loss_of_prepared` takes them.
        num_runs: steps that count; fewer, but one, of those that take long: no more than ``_LONG_S`` in all.  One that
            takes a fifth of that is enough to warm up.
        clock: of the device that the model is on; by default that of the processor.
        has_run: the layers of the model have just run, on a processor, at another size: one step warms up, which makes
            the optimiser's state.  Passes that take above half of ``_LONG_S`` count, and only the update is run again.
    """
    clock = clock or ThreadClock()
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    update = still_optimizer(optimizer, parameters) if parameters else None

    def passes() -> None:
        model.loss_of_prepared(*batch).backward()  # type: ignore[no-untyped-call]  # torch does not type it

    def step() -> StepSeconds:
        started = clock.start()
        passes()
        forward_and_backward = clock.stop(started)
        started = clock.start()
        if update is not None:
            update.step()
            update.zero_grad(set_to_none=True)
        rest = clock.stop(started)
        clock.settle()
        passes_s = clock.seconds(forward_and_backward)
        return StepSeconds(passes_s, passes_s + clock.seconds(rest))

    warm_ups = _WARM_UPS
    spent_s = 0.0
    if has_run:
        passes_s = timed(clock, passes)
        updates_s = [timed(clock, update.step) for _ in range(2)] if update is not None else [0.0]
        for parameter in parameters:
            parameter.grad = None
        if passes_s > _LONG_S / 2:
            return StepSeconds(passes_s, passes_s + updates_s[-1])
        warm_ups = 0
        spent_s = passes_s + sum(updates_s)
    times: list[StepSeconds] = []
    while len(times) < num_runs + warm_ups and (len(times) <= warm_ups or spent_s + times[-1].whole_s <= _LONG_S):
        gc.collect()
        gc.disable()
        try:
            times.append(step())
        finally:
            gc.enable()
        spent_s += times[-1].whole_s
        if times[0].whole_s > _LONG_S / 5:
            warm_ups = min(1, warm_ups)
    all_passes_s, whole_s = zip(*times[warm_ups:], strict=True)
    return StepSeconds(trimmed_mean(all_passes_s), trimmed_mean(whole_s))


def action_overhead_s(
    captured: CapturedModule, tensors: Mapping[str, Tensor], samples: int, num_runs: int, clock: LapClock | None = None
) -> float | None:
    """Seconds by which an action that follows a wait exceeds its layers: code and data have left the caches meanwhile.

    The network is cut into stages with as many operators each. Passes in which every F and every B waits first are run
    by turns with passes in which none does, as layers are timed; the median over actions of the median difference.
    Short actions tell it best, as what disturbs them grows with their length: give the fewest ``samples``.

    Args:
        tensors: the graph's inputs by name.
        num_runs: pairs of passes; fewer, but one, of those that take long (``_WAITS_S`` in all).
        clock: as of :func:`step_seconds`.

    Returns:
        None beside an accelerator, where the host's calls run ahead of the kernels.
    """
    if clock is not None and not isinstance(clock, ThreadClock):
        return None
    stages = _stages(segments(captured), _STAGES)
    longer: dict[tuple[str, bool], list[float]] = {}
    started_s = time.monotonic()
    runs = 0
    while runs < num_runs and (not runs or time.monotonic() - started_s < _WAITS_S):
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


def _stages(parts: Sequence[LayerSegment], number: int) -> tuple[LayerSegment, ...]:
    """Neighbouring layers as one, so that autograd goes through them in one call; by their numbers of operators."""
    groups: list[list[LayerSegment]] = [[] for _ in range(number)]
    total = sum(len(part.calls) for part in parts)
    so_far = 0
    for part in parts:
        groups[so_far * number // max(total, 1)].append(part)
        so_far += len(part.calls)
    return tuple(_as_one(group) for group in groups if group)


def _as_one(group: Sequence[LayerSegment]) -> LayerSegment:
    calls = tuple(node for part in group for node in part.calls)
    own = set(calls)
    reads = dict.fromkeys(node for part in group for node in part.reads if node not in own)
    return LayerSegment(
        group[0].name,
        calls,
        tuple(reads),
        tuple(node for part in group for node in part.results),
        tuple(parameter for part in group for parameter in part.parameters),
    )


def _owners(captured: CapturedModule) -> dict[str, tuple[nn.Parameter, ...]]:
    owned: set[int] = set()
    by_layer: dict[str, tuple[nn.Parameter, ...]] = {}
    for part in segments(captured):
        distinct = {id(parameter): parameter for parameter in part.parameters}.values()
        own = tuple(parameter for parameter in distinct if id(parameter) not in owned)
        owned.update(map(id, own))
        if own:
            by_layer[part.name] = own
    return by_layer


@torch.no_grad()
def _accumulate_s(parts: Mapping[str, tuple[nn.Parameter, ...]], num_runs: int, clock: LapClock) -> dict[str, float]:
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
    parts: Mapping[str, tuple[nn.Parameter, ...]], optimizer: Optimizer, num_runs: int, clock: LapClock
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
