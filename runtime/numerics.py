"""How far a plan's losses, gradients and state are from one device's.

Sums in another order give other rounding errors, so equality is a matter of tolerance.  In float64 that is 1e-10, far
below any mistake in weights, order or statistics (the smallest, one sample of 1,000 counted twice, is 1e-3) and far
above rounding.  In float32 losses must agree within 1e-4 and gradients within 1e-2, since batch normalisation over few
values a channel divides by small deviations and magnifies rounding.

Some networks magnify it further: the losses of an untrained ResNet-50 on 8 images, trained twice in float32 with sums
in another order, are 15 % apart after 5 steps.  Hence the yardstick: how far one device in float32 is from itself in
float64.  A plan may be ``ROUNDING_FACTOR`` times as far from one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat

import torch

from planner.ir.errors import NumericsError

_MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative errors that are accepted.

    Attributes:
        loss: of each step's loss.
        tensor: of a gradient, parameter or buffer, in the L2 norm.
        negligible: a tensor whose norm is below this share of the largest one is nothing but rounding (the gradient of
            a bias in front of a normalisation); its error is taken relative to the largest.
    """

    loss: float
    tensor: float
    negligible: float


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-10, 1e-12),
    torch.float32: Tolerance(1e-4, 1e-2, 1e-5),
    torch.bfloat16: Tolerance(5e-2, 2e-1, 1e-2),
    torch.float16: Tolerance(5e-2, 2e-1, 1e-2),
}


ROUNDING_FACTOR = 10.0
"""Two roundings of one value differ by about as much as each from the exact one; by chance, some by several times."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of the plan beside one device's.

    Attributes:
        name: of the parameter or buffer; ``loss`` for losses.
        kind: ``loss``, ``gradient``, ``parameter`` or ``buffer``.
        step: counted from 0.
        found, expected: the loss, or the norms of the tensors.
        error: relative.
        accepted: the largest error that is.
    """

    name: str
    kind: str
    step: int
    found: float
    expected: float
    error: float
    accepted: float

    def __str__(self) -> str:
        what = "loss" if self.kind == "loss" else f"{self.kind} of {self.name}"
        values = f"{self.found:.9g}, one device {self.expected:.9g}"
        return f"{what} at step {self.step}: {values}, relative error {self.error:.2e}, accepted {self.accepted:.0e}"


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """What was compared, and the worst of each kind.

    Attributes:
        num_steps: whose losses were compared; gradients and state are those of the first.
        num_tensors: gradients, parameters and buffers compared.
        worst: the largest error of each kind.
    """

    dtype: str
    num_steps: int
    num_tensors: int
    worst: Mapping[str, Difference]

    def __str__(self) -> str:
        errors = ", ".join(f"{kind} {difference.error:.1e}" for kind, difference in self.worst.items())
        return f"as one device over {self.num_steps} steps in {self.dtype}; largest relative errors: {errors}"


def loss_differences(
    found: Iterable[float], expected: Iterable[float], tolerance: Tolerance, rounding: Iterable[float] = ()
) -> list[Difference]:
    """The losses of each step, as far as both go.

    Args:
        rounding: how far one device's own losses are from exact ones.
    """
    triples = zip(found, expected, chain(rounding, repeat(0.0)), strict=False)
    return [
        Difference("loss", "loss", step, a, b, relative_error(a, b), _accepted(tolerance.loss, own))
        for step, (a, b, own) in enumerate(triples)
    ]


def relative_error(found: float, expected: float) -> float:
    """|found - expected| / |expected|, and 0 for equal numbers."""
    return abs(found - expected) / abs(expected) if found != expected else 0.0


def tensor_differences(
    kind: str,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
    rounding: Mapping[str, float] | None = None,
) -> list[Difference]:
    """The tensors of ``found``, after the first step, beside those of the same names in ``expected``.

    Args:
        rounding: how far one device's own tensors are from exact ones, by name.

    Raises:
        NumericsError: one device has no tensor of a name, or one of another shape.
    """
    norms = {name: _norm(tensor) for name, tensor in expected.items()}
    largest = max(norms.values(), default=0.0)
    differences = []
    for name, tensor in found.items():
        if name not in expected or expected[name].shape != tensor.shape:
            other = tuple(expected[name].shape) if name in expected else "none"
            raise NumericsError(f"{kind} of {name} has shape {tuple(tensor.shape)}, on one device {other}")
        distance = _norm(tensor.to(torch.float64) - expected[name].to(torch.float64))
        scale = largest if norms[name] < tolerance.negligible * largest else norms[name]
        error = distance / scale if distance else 0.0  # the scale is zero only where both are
        accepted = _accepted(tolerance.tensor, (rounding or {}).get(name, 0.0))
        differences.append(Difference(name, kind, 0, _norm(tensor), norms[name], error, accepted))
    return differences


def report(differences: Iterable[Difference], dtype: str) -> NumericsReport:
    """The worst of each kind.

    Raises:
        NumericsError: an error is larger than accepted, or no number; the worst are named.
    """
    found = list(differences)
    wrong = [difference for difference in found if not difference.error <= difference.accepted]
    if wrong:
        wrong.sort(key=lambda each: each.accepted / each.error if each.error == each.error else 0.0)
        more = [f"... and {len(wrong) - _MOST_SHOWN} more"] if len(wrong) > _MOST_SHOWN else []
        raise NumericsError(
            "the plan does not compute what one device does",
            [*map(str, wrong[:_MOST_SHOWN]), *more],
            [] if dtype == "float64" else ["--dtype float64, where rounding cannot be the cause"],
        )
    worst: dict[str, Difference] = {}
    for difference in found:
        if difference.kind not in worst or difference.error > worst[difference.kind].error:
            worst[difference.kind] = difference
    losses = sum(difference.kind == "loss" for difference in found)
    return NumericsReport(dtype, losses, len(found) - losses, worst)


def _accepted(limit: float, rounding: float) -> float:
    return max(limit, ROUNDING_FACTOR * rounding)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor.detach().to(torch.float64)).item()
