"""What all ranks do together between the last gradient of a step and its updates: sums of ties, and clipping.

The norm is that of all gradients of the model.  Each rank adds up a part of them such that each counts once: of the
ranks that have the same parameters, or the same part of one, every one takes some; a tied parameter is taken by the
first rank that has it; slices of a divided optimiser by their owners.  Then all ranks combine the same numbers in the
same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from planner.ir.errors import UsageError
from planner.ir.program import Program
from planner.ir.schedule import Op, format_grid
from runtime.numerics.finite import OnNan
from runtime.optim.sharding import ShardedParameters
from runtime.rank import RankContext
from runtime.stage.local_stage import AccumulationStep, LocalStage

_GRID_WIDTH = 4
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class GradientSync:
    """Finishes the steps of one rank.

    Args:
        local_stages: the stages of this rank.
    """

    def __init__(self, context: RankContext, local_stages: Mapping[int, LocalStage]) -> None:
        self._local_stages = local_stages
        self._transport = context.transport
        self._bound = local_stages
        self._clip_norm = context.clip_norm
        self._on_nan = context.on_nan
        named = {name: p for local_stage in local_stages.values() for name, p in local_stage.parameters.items()}
        self._tied = [(named[name], tie) for tie in context.ties if context.rank in tie.ranks for name in tie.names]
        self._accumulations = [AccumulationStep(), *(local_stage.accumulation for local_stage in local_stages.values())]
        for accumulation in self._accumulations:
            accumulation.count = context.accumulate
            accumulation.number = context.accumulate - 1

    def bind(self, local_stages: Mapping[int, LocalStage] | None) -> None:
        """Call with the local stages as they are bound to the batch of the step to come.

        Args:
            local_stages: None: of the last batch nothing is kept any more.
        """
        self._bound = local_stages or self._local_stages

    def begin(self) -> None:
        """Call when a step begins, before the local stages are reset."""
        for accumulation in self._accumulations:
            accumulation.advance()
            accumulation.checks = self._on_nan is OnNan.STOP and not self.is_agreed

    def take_back(self) -> None:
        """Call where the step that was begun is not done after all."""
        for accumulation in self._accumulations:
            accumulation.go_back()

    @property
    def is_last(self) -> bool:
        """Whether the step ends with an update; after others, training goes on from the gradients too."""
        return self._accumulations[0].is_last

    @property
    def joins_ranks(self) -> bool:
        """Whether ranks of several stages do anything together before an update."""
        return bool(self._tied or self._clip_norm) or self._on_nan is OnNan.SKIP

    @property
    def is_agreed(self) -> bool:
        """Whether :meth:`run` tells all ranks before the first update if something in the step is not finite."""
        clips = self._on_nan is OnNan.STOP and bool(self._clip_norm) and self.is_last
        return self._on_nan is OnNan.SKIP or clips

    @property
    def is_spoilt(self) -> bool:
        """Whether something that this rank knows of is not finite, so that it makes no update."""
        return any(accumulation.is_spoilt for accumulation in self._accumulations)

    def spoil(self) -> None:
        """Leave the update of this step out, and look at nothing any more."""
        for accumulation in self._accumulations:
            accumulation.is_spoilt = True
            accumulation.checks = False

    @torch.no_grad()
    def run(self) -> float | None:
        """Call before the first update of the step, on every rank.

        Ties are summed, and gradients clipped, in the last step before an update alone; where an update of NaN is left
        out, ranks agree on it in each.

        Returns:
            The norm of all gradients before clipping; None where they are not clipped.
        """
        if self.is_last:
            self._sum_ties()
        norm = None
        bad = False
        if self.is_last and self._clip_norm:
            norm, bad = self._norm()
        elif self.is_agreed:
            bad = self._is_spoilt_anywhere()
        if self.is_agreed and bad:
            self.spoil()
        if norm is None or self.is_spoilt:
            return norm
        coefficient = self._clip_norm / (norm + _EPSILON)
        if not coefficient >= 1.0:  # also where it is not a number, as torch does
            for gradient in self._gradients():
                gradient.mul_(coefficient)
        return norm

    def _sum_ties(self) -> None:
        pending = []
        for parameter, tie in self._tied:
            if len(tie.ranks) > 1:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                pending.append(self._transport.start_sum(parameter.grad, tie.ranks))
        for each in pending:
            each.wait()

    def _norm(self) -> tuple[float, bool]:
        """That of all gradients; and whether it, or a loss on some rank, is not finite."""
        gradients = [tensor.grad for tensor in self._counted() if tensor.grad is not None]
        norms = torch.zeros(self._transport.world_size + 1, dtype=torch.float64)
        norms[self._transport.rank] = get_total_norm(gradients).item() if gradients else 0.0
        if self._on_nan is not OnNan.IGNORE:
            norms[-1] = not all(local_stage.is_finite(gradients=False) for local_stage in self._bound.values())
        everyone = tuple(range(self._transport.world_size))
        self._transport.all_reduce(norms, everyone)  # one rank's number and zeros, at each place
        norm: float = torch.linalg.vector_norm(norms[:-1]).item()
        return norm, bool(norms[-1]) or not math.isfinite(norm)

    def _is_spoilt_anywhere(self) -> bool:
        """Whether on some rank a loss or gradient is not finite."""
        bad = torch.tensor([float(not all(local_stage.is_finite() for local_stage in self._bound.values()))])
        self._transport.all_reduce(bad, tuple(range(self._transport.world_size)))
        return bool(bad.item())

    def _counted(self) -> Iterator[nn.Parameter]:
        """Those whose gradients this rank adds to the norm."""
        for local_stage in self._local_stages.values():
            if isinstance(local_stage.updates.reduction, ShardedParameters):
                yield from (part.view for part in local_stage.updates.reduction.slices.values())
            else:
                own = ((name, p) for name, p in local_stage.parameters.items() if name not in local_stage.updates.tied)
                for number, (name, parameter) in enumerate(own):
                    group = local_stage.updates.group(name, local_stage.ranks)
                    if group[number % len(group)] == self._transport.rank and parameter.numel():
                        yield parameter
        yield from (parameter for parameter, tie in self._tied if tie.ranks[0] == self._transport.rank)

    def _gradients(self) -> list[Tensor]:
        """All gradients that this rank's optimisers see, each once."""
        gradients: dict[Any, Tensor] = {}
        for local_stage in self._local_stages.values():
            reduction = local_stage.updates.reduction
            slices = reduction.slices.values() if isinstance(reduction, ShardedParameters) else ()
            for tensor in (*local_stage.parameters.values(), *(part.view for part in slices)):
                if tensor.grad is not None:
                    gradients[tensor] = tensor.grad
        return list(gradients.values())


def check_finishing(program: Program) -> None:
    """Raises :class:`UsageError` unless nothing but updates of the whole step follow the first update of each rank.

    Tied parameters, clipping and updates that may be left out on all ranks need all gradients before the first update.
    """
    for rank, row in enumerate(program.rows):
        first = next((index for index, action in enumerate(row) if action.op is Op.UPDATE), len(row))
        for action in row[first:]:
            if action.op is not Op.UPDATE or action.microbatch is not None:
                raise UsageError(
                    "tied parameters, clipping and --on-nan skip need every gradient of a step before its first update",
                    [
                        f"rank {rank} comes to {action} with or after its first update",
                        format_grid(program.rows, (rank, action), _GRID_WIDTH),
                    ],
                    ["halopipe plan --schedule 1f1b"],
                )
