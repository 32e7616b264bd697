"""How far a plan's losses, gradients and state are from one device's.

Sums in another order give other rounding errors, so equality is a matter of tolerance.  In float64 that is 1e-10, far
below any mistake in weights, order or statistics (the smallest, one sample of 1,000 counted twice, is 1e-3) and far
above rounding.  In float32 losses must agree within 1e-4 and gradients within 1e-2, since batch normalisation over few
values a channel divides by small deviations and magnifies rounding.

Some networks magnify it further: the losses of an untrained ResNet-50 on 8 images, trained twice in float32 with sums
in another order, are 15 % apart after 5 steps.  Hence the yardstick: how far one device in float32 is from itself in
float64, on the same batch.  A plan may be ``ROUNDING_FACTOR`` times as far from one device, but never further than the
ceiling, which is below the smallest mistake that is common: a weight of micro-batches that is wrong by an eighth, or
one of eight left out.  Where one device's own rounding hides such mistakes, nothing is accepted: it is said that the
dtype cannot show whether the plan is right.  In float64 the yardstick is how far one device is from itself with weights
changed as much as the rounding of all layers might change what they make: most networks stay within 1e-10, those that
magnify more are held to what they magnify, and to 1e-7.

Tensors are compared by sketches, so that one device's gradients can be told to all ranks in a few numbers: element i is
added, with a random sign, to number i mod 64 (the count sketch of Charikar, Chen and Farach-Colton 2002, "Finding
frequent items in data streams").  The norm of the difference of two sketches is that of the tensors' difference within
about a tenth; it is exact up to 64 elements, and 0 where the tensors are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import Tensor

from planner.ir.errors import NumericsError
from runtime.numerics.difference import Difference

_MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative errors that are accepted.

    Attributes:
        loss: of each step's loss.
        tensor: of a gradient, parameter or buffer, in the L2 norm.
        negligible: a tensor whose norm is below this share of the largest one is nothing but rounding (the gradient of
            a bias in front of a normalisation); its error is taken relative to the largest.
        loss_ceiling, tensor_ceiling: the same, however large one device's own rounding is.
        faint: a tensor whose norm is below this share of the largest one is compared with that share: it is what is
            left of terms that cancel (a bias of a convolution in front of a normalisation), whose rounding stays.
    """

    loss: float
    tensor: float
    negligible: float
    loss_ceiling: float = math.inf
    tensor_ceiling: float = math.inf
    faint: float = 0.0


TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-10, 1e-12, 1e-7, 1e-7, 1e-6),
    torch.float32: Tolerance(1e-4, 1e-2, 1e-5, 1e-3, 5e-2),
    torch.bfloat16: Tolerance(5e-2, 1e-1, 1e-2, 5e-2, 1e-1),
    torch.float16: Tolerance(5e-2, 1e-1, 1e-2, 5e-2, 1e-1),
}


def tolerance_of(dtype: str, lowest: str = "") -> Tolerance:
    """What is accepted in ``dtype``.

    Args:
        lowest: the precision below ``dtype`` that some values are computed in.  Then what is accepted is still that of
            ``dtype``, but where one device's own rounding is larger: that counts up to the ceiling of the lower one.
    """
    own = TOLERANCES[getattr(torch, dtype)]
    if not lowest:
        return own
    other = TOLERANCES[getattr(torch, lowest)]
    return replace(
        own,
        negligible=other.negligible,
        loss_ceiling=other.loss_ceiling,
        tensor_ceiling=other.tensor_ceiling,
    )


ROUNDING_FACTOR = 10.0
"""Two roundings of one value differ by about as much as each from the exact one; by chance, some by several times."""


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """What was compared, and the worst of each kind.  With one device, which is the user's own module.

    Attributes:
        num_steps: whose losses were compared; gradients and state are those of the first.
        num_tensors: gradients, parameters and buffers compared.
        worst: the largest error of each kind.
        witness: how one device ran the batch, and what it lacked.
        hidden: how many of the differences rounding in this dtype would hide; they are in ``worst``.
        skipped: why nothing was compared; empty: it was.
    """

    dtype: str
    num_steps: int
    num_tensors: int
    worst: Mapping[str, Difference]
    witness: str = ""
    hidden: int = 0
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """What the comparison came to, without figures."""
        if self.skipped:
            return f"not compared with one device: {self.skipped}"
        steps = "the first step" if self.num_steps <= 1 else f"{self.num_steps} steps"  # 0: a rank without the loss
        hidden = f", but for {self.hidden} tensors or losses whose differences rounding hides" if self.hidden else ""
        return f"as one device over {steps} in {self.dtype}{hidden}"

    def __str__(self) -> str:
        if self.skipped:
            return self.verdict
        errors = ", ".join(f"{kind} {difference.error:.1e}" for kind, difference in self.worst.items())
        lines = [f"{replace(self, hidden=0).verdict}; largest relative errors: {errors}"]
        if self.witness:
            lines.append(f"one device: {self.witness}")
        if self.hidden:
            lines.append(
                f"{self.hidden} of them cannot be judged in {self.dtype}, whose own rounding is as large: "
                "--check-numerics --dtype float64 can"
            )
        return "; ".join(lines)


NUM_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor in a few numbers, whose differences are those of the tensors.

    Attributes:
        norm: of the tensor, exact.
        buckets: sums of its elements with random signs.
    """

    shape: tuple[int, ...]
    norm: float
    buckets: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Sketch:
        """That of ``tensor``; the signs are the same for all tensors of a size, and on all machines."""
        numbers = tensor.detach()
        numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
        flat = numbers.to("cpu", torch.float64).flatten()
        buckets = torch.zeros(NUM_BUCKETS, dtype=torch.float64)
        generator = torch.Generator().manual_seed(flat.numel())
        for part in torch.split(flat, _CHUNK):
            signs = torch.randint(0, 2, (part.numel(),), dtype=torch.int8, generator=generator).mul_(2).sub_(1)
            signed = torch.nn.functional.pad(part * signs, (0, -part.numel() % NUM_BUCKETS))
            buckets += signed.view(-1, NUM_BUCKETS).sum(0)
        return cls(tuple(tensor.shape), torch.linalg.vector_norm(flat).item(), buckets)

    def distance(self, other: Sketch) -> float:
        """The norm of the difference of the two tensors, about."""
        return float(torch.linalg.vector_norm(self.buckets - other.buckets))


_CHUNK = 1 << 20


def sketches(tensors: Mapping[str, Tensor]) -> dict[str, Sketch]:
    """The sketch of each tensor."""
    return {name: Sketch.of(tensor) for name, tensor in tensors.items()}


def loss_differences(
    losses: Iterable[float], expected: Iterable[float], tolerance: Tolerance, rounding: Iterable[float] = ()
) -> list[Difference]:
    """The losses of each step, as far as both go.

    Args:
        rounding: how far one device's own losses are from exact ones.
    """
    triples = zip(losses, expected, chain(rounding, repeat(0.0)), strict=False)
    return [
        Difference(
            "loss", "loss", step, a, b, relative_error(a, b), *_accepted(tolerance.loss, tolerance.loss_ceiling, own)
        )
        for step, (a, b, own) in enumerate(triples)
    ]


def relative_error(actual: float, expected: float) -> float:
    """|actual - expected| / |expected|, and 0 for equal numbers."""
    return abs(actual - expected) / abs(expected) if actual != expected else 0.0


def tensor_differences(
    kind: str,
    tensors: Mapping[str, Sketch],
    expected: Mapping[str, Sketch],
    tolerance: Tolerance,
    rounding: Mapping[str, float] | None = None,
) -> list[Difference]:
    """The tensors of ``tensors``, after the first step, beside those of the same names in ``expected``.

    Args:
        rounding: how far one device's own tensors are from exact ones, by name.

    Raises:
        NumericsError: one device has no tensor of a name, or one of another shape.
    """
    largest = max((each.norm for each in expected.values()), default=0.0)
    differences = []
    for name, tensor in tensors.items():
        if name not in expected or expected[name].shape != tensor.shape:
            other = expected[name].shape if name in expected else "none"
            raise NumericsError(f"{kind} of {name} has shape {tensor.shape}, on one device {other}")
        wanted = expected[name]
        distance = tensor.distance(wanted)
        is_negligible = wanted.norm < tolerance.negligible * largest
        scale = largest if is_negligible else max(wanted.norm, tolerance.faint * largest)
        error = distance / scale if distance and scale else (math.inf if distance else 0.0)
        accepted = _accepted(tolerance.tensor, tolerance.tensor_ceiling, (rounding or {}).get(name, 0.0))
        differences.append(Difference(name, kind, 0, tensor.norm, wanted.norm, error, *accepted))
    return differences


def report(differences: Iterable[Difference], dtype: str, *, witness: str = "", strict: bool = True) -> NumericsReport:
    """The worst of each kind.

    Args:
        witness: how one device ran the batch.
        strict: whether what rounding hides is an error as well; it is not where it is a later step's loss, since steps
            magnify rounding.

    Raises:
        NumericsError: an error is larger than accepted, or no number; the worst are named.  Or one device's own numbers
            are not finite.
    """
    judged = [each for each in differences if each.step == 0 or not each.is_hidden]
    wrong = [difference for difference in judged if difference.is_wrong]
    hidden = [difference for difference in judged if difference.is_hidden]
    in_float64 = [] if dtype == "float64" else ["--check-numerics --dtype float64"]
    if wrong and not any(math.isfinite(difference.expected) for difference in wrong):
        in_float32 = ["profile again with --dtype float32, and --autocast bfloat16 if memory is short"]
        raise NumericsError(
            "one device's own numbers are not finite, so nothing can be compared with them",
            [*_worst_lines(wrong), f"{dtype} holds numbers up to {torch.finfo(getattr(torch, dtype)).max:.3g}"],
            [*(in_float32 if dtype == "float16" else []), *in_float64, "an example without such numbers"],
        )
    if wrong:
        raise NumericsError(
            "the plan does not compute what one device does",
            [*_worst_lines(wrong), *([f"one device: {witness}"] if witness else [])],
            in_float64,
        )
    if hidden and strict:
        raise NumericsError(
            f"whether the plan computes what one device does cannot be judged in {dtype}",
            ["one device's own rounding error is as large as what is compared", *_worst_lines(hidden)],
            in_float64,
        )
    worst: dict[str, Difference] = {}
    for difference in judged:
        if difference.kind not in worst or difference.error > worst[difference.kind].error:
            worst[difference.kind] = difference
    losses = sum(difference.kind == "loss" for difference in judged)
    return NumericsReport(dtype, losses, len(judged) - losses, worst, witness, len(hidden))


def _worst_lines(wrong: Iterable[Difference]) -> list[str]:
    worst_first = sorted(wrong, key=lambda each: each.accepted / each.error if each.error == each.error else 0.0)
    more = [f"... and {len(worst_first) - _MOST_SHOWN} more"] if len(worst_first) > _MOST_SHOWN else []
    return [*map(str, worst_first[:_MOST_SHOWN]), *more]


def _accepted(limit: float, ceiling: float, rounding: float) -> tuple[float, float]:
    """The largest error that is accepted, and that rounding may make where it is larger than the ceiling."""
    own = ROUNDING_FACTOR * rounding
    return min(max(limit, own), ceiling), own if own > ceiling else 0.0
