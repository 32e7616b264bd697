"""Work of a backward that nothing waits for, such as a weight's gradient: done while a message is on its way.

    backward    conv2: dx, put(dw)    norm1: start sum, run -> conv2's dw, wait    conv1: dx, put(dw)    end: run

What is put holds the tensors that it needs, so only a few are kept: one more, and the oldest is done at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from cuda_ops.dense.deferred_gradients import accumulate

MOST_KEPT = 2
"""A residual block's two branches may each leave one."""


class DeferredGradients:
    """What the backward of one stage has put off; empty again when the backward is over.

    Attributes:
        targets: leaves whose gradients are put off.
        added: told of each parameter whose ``.grad`` has been added to here rather than by autograd.
    """

    def __init__(self, added: Callable[[Tensor], None] | None = None, most_kept: int = MOST_KEPT) -> None:
        self.added = added
        self._most_kept = most_kept
        self.targets: set[Tensor | None] = set()
        self._works: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        """How many are put off."""
        return len(self._works)

    def put(self, compute: Callable[[], None]) -> None:
        """Do ``compute`` at the next :meth:`run`, or before."""
        while len(self._works) >= self._most_kept:
            self._do_oldest()
        self._works.append(compute)

    def put_gradients(
        self, targets: tuple[Tensor | None, ...], compute: Callable[[], tuple[Tensor | None, ...]]
    ) -> None:
        """The same for gradients of leaves that nothing else adds to in this backward; None where none is wanted."""
        self.targets.update(target for target in targets if target is not None)
        self.put(lambda: self._add(targets, compute()))

    def run(self) -> None:
        """Do all that was put."""
        while self._works:
            self._do_oldest()

    def clear(self) -> None:
        """Forget all that was put: the backward came to nothing."""
        self._works.clear()
        self.targets.clear()

    @torch.no_grad()
    def _do_oldest(self) -> None:
        self._works.popleft()()

    def _add(self, targets: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
        for target, gradient in zip(targets, gradients, strict=True):
            self.targets.discard(target)
            if target is not None and gradient is not None:
                accumulate(target, gradient)
                if self.added is not None:
                    self.added(target)
