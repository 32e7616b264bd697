"""What a step costs beside forward and backward: adding up gradients, and the optimiser; and a whole step, to compare.

The optimiser runs with a learning rate of 0: the same work, and the model stays as it is.
"""

from __future__ import annotations

import difflib
import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer, ParameterCost
from profiler.capture.graph import Captured
from profiler.measure.noise import Clock, ThreadClock, timed
from profiler.measure.segments import Segment, segments
from profiler.measure.timing import trimmed_mean
from profiler.source.model import LoadedModel


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

    times = []
    for _ in range(num_runs + 2):
        gc.collect()
        gc.disable()
        try:
            times.append(timed(clock, step))
        finally:
            gc.enable()
    return trimmed_mean(times[2:])


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
