"""Calling the functions of a stage: in training or evaluation, with and without gradients, under autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cuda_ops.recurrent import autocast
from runtime.stages.cut import StageFunction
from runtime.stages.manner import Mode, Portion

Variant = Callable[[Mode], StageFunction]
"""A stage in another mode, with the same inputs, outputs, sizes and attributes."""


class Told(Protocol):
    """Something that must know what is run next."""

    def at(self, portion: Portion) -> None:
        """A micro-batch, or a part of one."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """All that it takes to run a stage on a micro-batch, and to run it again.

    Attributes:
        values: the inputs, in order.
        state: the attributes, in order.
    """

    portion: Portion
    values: tuple[Tensor, ...]
    state: tuple[Tensor, ...]


class StageCalls:
    """The functions of one stage, made when they are first needed.

    Args:
        function: for training, on a share with rows.
        variant: None: there is only ``function``.
        told: of what is run, before each run: what layers draw by, how they are divided.
    """

    def __init__(
        self,
        function: StageFunction,
        autocast: torch.dtype | None = None,
        variant: Variant | None = None,
        told: Sequence[Told] = (),
    ) -> None:
        self._functions = {Mode(): function}
        self._autocast, self._variant, self._told = autocast, variant, tuple(told)

    def run(self, call: Call, training: bool = True) -> dict[str, Tensor]:
        """The outputs by name."""
        function = self._function(Mode(training, not call.portion.num_samples))
        for each in self._told:
            each.at(call.portion)
        arguments = (call.portion.num_samples, *call.portion.sizes, *call.values, *call.state)
        device = next((tensor.device.type for tensor in (*call.state, *call.values)), "cpu")
        with autocast(device, self._autocast):
            outputs = function.function(*arguments)
        return dict(zip(function.outputs, outputs, strict=True))

    def run_without_gradients(self, call: Call, training: bool = True) -> dict[str, Tensor]:
        """The outputs by name; nothing else is kept."""
        with torch.no_grad():
            return self.run(call, training)

    def _function(self, mode: Mode) -> StageFunction:
        found = self._functions.get(mode)
        if found is None:
            found = self._functions[mode] = self._functions[Mode()] if self._variant is None else self._variant(mode)
        return found
