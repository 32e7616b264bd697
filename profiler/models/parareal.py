"""A parareal network: the time of a deep residual network cut into slices, whose fine blocks run side by side.

Parareal (Lions, Maday and Turinici 2001, "Resolution d'EDP par un schema en temps parareel") solves u' = f(u) over N
slices of time at once: a coarse propagator G goes through them in sequence, fine ones F start from what it found, each
in its own slice, and a coarse sweep carries their defects on.  A residual network is such a solver, each block a step
(Guenther et al. 2020, "Layer-parallel training of deep residual neural networks"); with weights of its own for each
propagator it is a parareal network (Lee, Park and Lee 2022, "Parareal neural networks emulating a parallel-in-time
algorithm").  One iteration, where j counts slices from 0:

    x[j+1] = G[j](x[j])                       predictions, in sequence
    y[j+1] = F[j](x[j])                       fine blocks, side by side
    u[1] = y[1],  u[j+1] = y[j+1] + C[j](u[j] - x[j])                    corrections, in sequence

    x0 -> G0 -> G1 -> G2          Each F needs its own start alone.  With N devices a pass takes the time of N - 1
    |     |     |     |           predictions, one fine block and N - 1 corrections, not that of N fine blocks.
    F0    F1    F2    F3
    +---> C0 -> C1 -> C2 -> u

If every F is linear, and C[j] = F[j], then u is what the fine blocks give one after another, whatever G is: the
correction takes back what the prediction missed (a test asks for that).
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, indices, normal, require_dims


class EulerStep(nn.Module):
    """A step of Euler's method: u + h conv(tanh(conv(u)))."""

    def __init__(self, channels: int, step: float) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)
        self.outer = nn.Conv2d(channels, channels, 3, padding=1)
        self.step = step

    def forward(self, u: Tensor) -> Tensor:
        """(sample, channel, height, width) to the same."""
        after: Tensor = u + self.step * self.outer(self.inner(u).tanh())
        return after


class Parareal(nn.Module):
    """``slices`` fine propagators of ``steps`` steps each, and coarse ones of one step.

    Args:
        fine, predict, correct: the propagators F, G and C; of each of the last two one less than slices.
    """

    def __init__(self, fine: list[nn.Module], predict: list[nn.Module], correct: list[nn.Module]) -> None:
        super().__init__()
        if not len(fine) - 1 == len(predict) == len(correct):
            counts = f"{len(fine)} slices, {len(predict)} predictions, {len(correct)} corrections"
            raise ValueError(f"{counts}: there is one less of each than of slices")
        self.fine, self.predict, self.correct = map(nn.ModuleList, (fine, predict, correct))

    def forward(self, u: Tensor) -> Tensor:
        """The state after all slices."""
        starts = [u]
        for propagate in self.predict:
            starts.append(propagate(starts[-1]))
        ends = [propagate(start) for propagate, start in zip(self.fine, starts, strict=True)]
        state: Tensor = ends[0]  # of the first slice the start is known: it has no defect
        for (_, start), end, carry in zip(pairwise(starts), ends[1:], self.correct, strict=True):
            state = end + carry(state - start)
        return state


def parareal(
    *,
    input_shape: tuple[int, ...] = (8, 3, 32, 32),
    slices: int = 4,
    steps: int = 8,
    width: int = 16,
    num_classes: int = 10,
    time: float = 4.0,
) -> Example:
    """A classifier of pictures, with ``slices`` fine propagators of ``steps`` residual blocks.

    Args:
        width: channels.
        time: over all slices; a block of a fine propagator is a step of time / (slices * steps).
    """
    require_dims("parareal", input_shape, ("sample", "channel", "height", "width"))
    if slices < 2 or steps < 1:
        raise ValueError(f"parareal: {slices} slices of {steps} steps; at least 2 of 1 are needed")
    each = time / slices
    fine: list[nn.Module] = [
        nn.Sequential(*(EulerStep(width, each / steps) for _ in range(steps))) for _ in range(slices)
    ]
    predict: list[nn.Module] = [EulerStep(width, each) for _ in range(slices - 1)]
    correct: list[nn.Module] = [EulerStep(width, each) for _ in range(slices - 1)]
    module = nn.Sequential(
        nn.Conv2d(input_shape[1], width, 3, padding=1),
        Parareal(fine, predict, correct),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )
    images = normal(input_shape, seed=0)
    labels = indices(num_classes, input_shape[:1], seed=1)
    return module, (images, labels), functional.cross_entropy
