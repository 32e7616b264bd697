"""Running statistics that are the mean over all batches so far: batch norms with ``momentum=None``.

torch works out in Python how much a new batch counts, ``1 / float(num_batches_tracked)``: a number that is read out of
a buffer, which no captured graph can hold.  The same in operators, of statistics r of k batches and m of the new one:

    before      s = copy of r
    the norm    s = m                       with a momentum of 1
    after       r = (k r + s) / (k + 1)     k = k + 1

The operator in the middle is an ordinary batch norm: ranks share its statistics, parts of space and channels go through
it as through any other.  What stands around it takes each channel by itself.  It writes a copy, since its backward
wants what it was given as that was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cuda_ops._torch import BatchNormBase

MOMENTUM = 1.0
"""Of the batch norm within :func:`averaged`."""


@contextmanager
def averaged(batches: Tensor, mean: Tensor, var: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What a batch norm with :data:`MOMENTUM` is given within, once, to count as one batch of all.

    Args:
        batches: how many there were, an integer without dims; one more afterwards.
        mean, var: running statistics, (channels,); the means over all batches afterwards.
    """
    copies = mean.clone(), var.clone()
    yield copies
    for each, of_batch in zip((mean, var), copies, strict=True):
        each.mul_(batches).add_(of_batch).div_(batches + 1)
    batches.add_(1)


def is_averaging(module: Any) -> bool:
    """Whether a batch norm in training takes the mean over all batches."""
    return bool(
        module.training
        and module.track_running_stats
        and module.momentum is None
        and module.num_batches_tracked is not None
    )


@contextmanager
def averages_in_operators() -> Iterator[None]:
    """A context in which torch's own batch norms average by :func:`averaged`; for a trace of their operators."""
    norms: Any = BatchNormBase  # as a class that one may change: torch's types do not know of it
    original = norms.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        if not is_averaging(self):
            output: Tensor = original(self, input)
            return output
        with averaged(self.num_batches_tracked, self.running_mean, self.running_var) as (mean, var):
            return nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, MOMENTUM, self.eps)

    norms.forward = forward
    try:
        yield
    finally:
        norms.forward = original
