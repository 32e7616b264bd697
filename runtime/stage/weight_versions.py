"""The versions of a stage's weights, in programs that update them while micro-batches are on their way.

    row        0F0 0F1 0F2 0B0 0UPDATE0 0F3@1 0B1 ...
    storage    parameter: v0 ---------+ v1 ---------       the update changes the parameter, as ever
               copy:                  + v0 ------ ...      what micro-batches 1 and 2 run on; dropped after the last

A micro-batch runs on leaves of its own that share storage with the parameter, but not its version counter, as the
optimiser writes it between forward and backward of other micro-batches.  Before an update, if a micro-batch of the
step still needs the weights, the *parameter* moves to new storage: it stays the same object, and so does what the
optimiser keeps for it.  ("Weight stashing", Narayanan et al. 2019, "PipeDream", section 3.3.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from cuda_ops.dense.deferred_gradients import accumulate


class Weights:
    """The trained parameters of one stage, as its micro-batches see them.

    Args:
        parameters: of the stage; updates happen to these.
        uses: how many micro-batches of a step run on each version; empty: all on version 0, none changed on the way.
        added: told of each parameter whose ``.grad`` has been added to here rather than by autograd.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        uses: Mapping[int, int] | None = None,
        added: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._parameters = tuple(parameters)
        self._uses = dict(uses or {})
        self._added = added
        self._remaining: Counter[int] = Counter()
        self._data: dict[int, tuple[Tensor, ...]] = {}
        self._newest = 0
        self.reset()

    @property
    def is_versioned(self) -> bool:
        """Whether micro-batches run on leaves of their own."""
        return bool(self._uses)

    @property
    def num_kept(self) -> int:
        """Versions in memory, the newest included."""
        return len({*self._data, self._newest})

    def leaves(self, version: int) -> tuple[Tensor, ...]:
        """What one micro-batch runs on, in the order of the parameters.

        Raises:
            ValueError: the version is not there, or no further micro-batch was to run on it.
        """
        if not self.is_versioned:
            return self._parameters
        if version == self._newest and version not in self._data:
            self._data[version] = tuple(parameter.data for parameter in self._parameters)
        if version not in self._data or not self._remaining[version]:
            raise ValueError(
                f"version {version} of the weights is not kept, only {sorted({*self._data, self._newest})}"
            )
        return tuple(data.detach().requires_grad_() for data in self._data[version])

    def collect(self, leaves: Sequence[Tensor], version: int) -> None:
        """Adds the gradients of a micro-batch to those of the parameters; it needs its weights no longer."""
        if not self.is_versioned:
            return
        for leaf, parameter in zip(leaves, self._parameters, strict=True):
            if leaf.grad is not None:
                accumulate(parameter, leaf.grad)
                leaf.grad = None
                if self._added is not None:
                    self._added(parameter)
        self._remaining[version] -= 1
        if not self._remaining[version]:
            self._data.pop(version, None)

    def before_update(self) -> None:
        """Call before the optimiser changes the parameters: what still needs them keeps them as they are."""
        if not self.is_versioned:
            return
        if self._remaining[self._newest]:
            self._data.setdefault(self._newest, tuple(parameter.data for parameter in self._parameters))
            for parameter in self._parameters:
                parameter.data = torch.clone(parameter.data)
        self._newest += 1

    def reset(self) -> None:
        """A new step: the parameters are its version 0."""
        self._data.clear()
        self._remaining = Counter(self._uses)
        self._newest = 0
