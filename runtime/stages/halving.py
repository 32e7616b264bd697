"""The weight gradients that a backward for the input leaves, and when each parameter's is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cuda_ops.deferred import WeightGradients, accumulate
from cuda_ops.halves import Gradients

Added = Callable[[Tensor], None]
"""Told of a parameter whose ``.grad`` is complete, as far as one micro-batch goes."""


class LeftGradients(WeightGradients):
    """What one micro-batch leaves; tells of parameters one by one, so that their gradients can be sent at once.

    Args:
        added: told of each of ``parameters`` in :meth:`run`, once.
    """

    def __init__(self, parameters: Iterable[Tensor], added: Added | None) -> None:
        super().__init__(self._add_and_tell)
        self._parameters, self._added = tuple(parameters), added
        self._parts: Counter[Tensor] = Counter()
        self._told: set[Tensor] = set()

    def note(self, targets: tuple[Tensor | None, Tensor | None], compute: Callable[[], Gradients]) -> None:
        super().note(targets, compute)
        for target in targets:
            if target is not None:
                self._parts[target] += 1

    @torch.no_grad()
    def run(self) -> None:
        self._tell(parameter for parameter in self._parameters if not self._parts[parameter])
        super().run()
        self._tell(self._parameters)

    def _add_and_tell(self, parameter: Tensor, gradient: Tensor) -> None:
        accumulate(parameter, gradient)
        self._parts[parameter] -= 1
        if not self._parts[parameter]:
            self._tell([parameter])

    def _tell(self, parameters: Iterable[Tensor]) -> None:
        if self._added is None:
            return
        for parameter in parameters:
            if parameter not in self._told:
                self._told.add(parameter)
                self._added(parameter)
