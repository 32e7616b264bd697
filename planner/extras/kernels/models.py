"""The kernels of a device: products, attention, and operators that memory bounds, each as an :class:`Estimate`.

Of each kind of kernel the first of these that there is counts:

    the device's own table
    the table of a device of the same chip  (A100-40GB for A100-80GB), with the figures of the device asked for; of
                                            products where its error is less than half
    a table in another dtype                of what memory bounds
    the data sheet                          with the mean constants of all devices that have tables; its range is the
                                            error that this has on each of them, left out
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log10
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.extras.kernels.curves import Device
from planner.extras.kernels.estimates import DATASHEET, NOTHING, TABLE, Estimate
from planner.extras.kernels.fit import ANY_DEVICE, BATCHED, WIDTHS, Fit, fit_rows, general_dtype, stored_fits
from planner.extras.kernels.tables import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_KINDS,
    GEMM,
    GROUPED,
    MEMORY_BOUND,
    TUNED_ATTENTION,
    TUNED_ATTENTION_BACKWARD,
    dtype_of,
    read_table,
)
from planner.ir.errors import UnknownNameError

_CHIPS = (
    ("A100-80GB", "A100-40GB"),
    ("V100-16GB", "V100-32GB", "Titan-V"),
    ("H100-SXM", "GH200-96GB", "H200", "H100-PCIe", "H100-96GB"),
    ("B200", "GB200", "B300", "GB300"),
)
_STAND_INS = {"softmax": "elementwise", "softmax_backward": "elementwise", "dropout_backward": "dropout"}
"""For a kind of which no table says anything at all: one that streams as plainly."""

_SUSTAINED = {
    "A100-80GB": (1.04, 1.04), "A100-40GB": (1.04, 1.04), "H100-SXM": (1.11, 1.11), "H100-96GB": (1.11, 1.11),
    "H200": (1.11, 1.11), "L40S": (1.22, 1.22), "B200": (1.41, 1.0), "GB200": (1.12, 1.12), "B300": (1.11, 1.11),
    "GB300": (1.10, 1.10),
}  # fmt: skip
_COOL_S = 1e-3
"""How much longer a product in half precision takes in a step, whose chip is at its limit of power, than alone; and how
much of that those of 10 ms or more have in its table.  Tables time each a dozen times.  Those of 10 ms keep a chip busy
until its clock falls: beside the curve of those below 2.5 ms they take longer by so much, 7 on H100 by 1.09 and 3 on
H200 by 1.18 (in FP8 1.02), 5 on GB200, 4 on B300 and 6 on GB300 by 1.12, 1.11 and 1.10; up to 1 ms no longer.

Of B200 there is a table of training's own products, each a hundred times in a loop (SimuMax; random numbers in both).
Where the loop is short (10 ms) they take what they take here; where each takes more than 1 ms, forward takes 1.37 times
as long, the input's gradient 1.36, the weight's, which is added to one in float32, 1.50: 1.41 is the mean of the three
(medians of 36, 33 and 51).  Two of its products that took 10 ms or more here, 1.12 and 1.23, are left out."""
_LIMITED = {"H100-96GB": 1.25}
"""How much longer all products are of a card of another limit of power than that of its chip's tables: 500 of 700 W, to
the power of 0.66.  Between 0.48, FlashAttention-3 on H100 of 350 and 700 W, 243 and 392 TFLOP/s with 114 and 132
multiprocessors (github.com/Dao-AILab/flash-attention/issues/1777), and 0.85, products on A100 of 250 and 400 W, 158 and
235 TFLOP/s (github.com/NVIDIA/cutlass/issues/956)."""
_GROUPED_ON = "H100-SXM"
"""Whose kernels of experts' products stand for those of devices without a table, with the figures of the device."""

_HALF = 2
"""Bytes of a number in half precision."""
_ALIGNED = 8
_UNALIGNED = 0.095
"""Numbers of 16 bytes, of which rows must be whole multiples for the kernels that tables time; what others reach of the
peak: 71 to 115 TFLOP/s, the middle 95, of five products on H100 that reach 500 otherwise
(github.com/meta-pytorch/float8_experimental/pull/145).  It is asked of heads alone, products of several matrices."""
_NEAR = 0.02
_INSIDE = 0.7
"""Sums of logarithms: the same shape; how far shapes of a network that was held back usually are from the others."""
_MOST_WIDENED = 2.0
"""The power to which a range is raised at most, however far a shape is from those measured."""

_FUSED = {
    "forward": {32: 0.37, 64: 0.52, 96: 0.58, 128: 0.62, 160: 0.60, 192: 0.51, 224: 0.50, 256: 0.54},
    "backward": {32: 0.33, 64: 0.44, 96: 0.43, 128: 0.52, 160: 0.40, 192: 0.39, 224: 0.37, 256: 0.37},
}
_BETWEEN = {"forward": 0.84, "backward": 0.93}
_BESIDE_A100 = {
    **{name: {"forward": 0.60, "backward": 0.63} for name in _CHIPS[2]},
    **{name: {"forward": 0.28, "backward": 0.32} for name in _CHIPS[3]},
}
_FLASH = {"forward": 0.43, "backward": 0.284}
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_OF_LENGTH = {"forward": (0.84, 0.95, 0.98, 0.99, 1, 1), "backward": (0.66, 0.81, 0.90, 0.96, 0.99, 1)}
_OF_MASK = (0.62, 0.74, 0.82, 0.87, 0.90, 0.91)
_TUNED_BACKWARD = 3.0
_FUSED_LOW = 0.75
_FUSED_HIGH = 1.5
"""Shares of the peak that FlashAttention-2 reaches on long sequences, by head size: on A100 (Dao 2023, arXiv
2307.08691, figures 4 to 7; others than 64 and 128 by estimate-train-time), of those what it reaches on H100, whose new
instructions it does not use, of that on shorter sequences, and of that under a causal mask, whose diagonal is computed
whole (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6; forward); and what it reaches on B200 (360 TFLOP/s forward
with heads of 128, github.com/meta-pytorch/tritonbench/pull/171; 380 and 334 with heads of 64,
github.com/Dao-AILab/flash-attention/issues/1589).  A head of a size between takes the time of the
next, and its edge is looked after: ten sizes from 72 to 240 reach 0.74 to 0.96 of that forward, 0.78 to 1 backward
(estimate-train-time).  The first FlashAttention, and Triton's, on A100: 84 to 122 TFLOP/s forward and 49 to 81
backward, of 1,024 to 16,384 tokens (github.com/triton-lang/triton/pull/1917), which these shares and those by length
and mask follow; 30 to 50 and 25 to 35 % of the peak, Dao says (section 1).
A backward of cuDNN takes 2.9 to 3.3 forwards on H100, from 16,384 to 2,048 tokens; 2.6 to 3.3 on A100 (SimuMax); of
B200 there is a table."""


class AttentionKernel(StrEnum):
    """What fuses the core of attention.

    ``TUNED``: the maker's library (cuDNN, as Megatron-LM calls it), with the chip's newest instructions, where a table
    has it.  ``FLASH_2``: FlashAttention-2, as PyTorch calls it since 2.2.  ``FLASH``: FlashAttention before July 2023,
    and its text in Triton of that time.
    """

    TUNED = "tuned"
    FLASH_2 = "flash-2"
    FLASH = "flash"


class AttentionShape(NamedTuple):
    """Extents of an attention's core; groups of the ``heads`` of queries share one of the ``kv_heads``."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Kernels:
    """What kernels of a device take in a dtype.

    Attributes:
        fits: by kind of kernel, with the words for where they are from.
    """

    device: Device
    dtype: str
    width: int
    fits: Mapping[str, tuple[Fit, str]]
    _known: dict[tuple[str, tuple[int, ...]], Estimate] = field(default_factory=dict, repr=False, compare=False)

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> Estimate:
        """C[m, n] = A[m, k] B[k, n], ``batch`` times in one kernel.

        A layer's backward is two products of their own: its input's gradient (m, k, n), its weight's (k, n, m).
        """
        if min(m, n, k, batch) <= 0:
            return NOTHING
        if batch > 1:
            aligned = self._estimate(BATCHED, (m, n, k, batch))
            if self.width == _HALF and (n % _ALIGNED or k % _ALIGNED):
                unaligned_s = 2.0 * m * n * k * batch / (_UNALIGNED * self.device.peak_flop_per_s)
                unaligned = Estimate(unaligned_s, unaligned_s * _FUSED_LOW, unaligned_s * _FUSED_HIGH, DATASHEET)
                return max(aligned, unaligned, key=lambda estimate: estimate.seconds)
            return aligned
        alone = self._estimate(GEMM, (m, n, k, batch))
        limited = alone * _LIMITED.get(self.device.name, 1.0)
        return limited * self._sustained(alone.seconds) if self.width == _HALF else limited

    def _sustained(self, seconds: float) -> float:
        """By how much one that takes so long alone is longer at the limit of power, beyond what its time has of it."""
        is_hot = min(max(log10(seconds / _COOL_S), 0.0), 1.0)
        in_step, in_table = _SUSTAINED.get(self.device.name, (1.0, 1.0))
        return float(in_step / in_table * in_table ** (1 - is_hot))

    def grouped(self, m: int, n: int, k: int, groups: int) -> Estimate:
        """As many products with matrices of their own in one kernel: ``m`` rows of each of so many experts.

        No faster than one product of all their rows.
        """
        if min(m, n, k, groups) <= 0:
            return NOTHING
        grouped = self._estimate(GROUPED, (m, n, k, groups))
        return max(grouped, self.gemm(m * groups, n, k), key=lambda estimate: estimate.seconds)

    def attention(self, shape: AttentionShape, fused: bool, by: AttentionKernel = AttentionKernel.FLASH_2) -> Estimate:
        """Scores, softmax and context; dropout of the scores, where there is any, is extra if not ``fused``.

        Args:
            by: what fuses them.
        """
        return self._attention(ATTENTION, shape, fused, by)

    def attention_backward(
        self, shape: AttentionShape, fused: bool, by: AttentionKernel = AttentionKernel.FLASH_2
    ) -> Estimate:
        """The gradients of queries, keys and values; fused kernels compute the scores again."""
        return self._attention(ATTENTION_BACKWARD, shape, fused, by)

    def memory_bound(self, num_bytes: float, launches: int = 1, kind: str = "elementwise") -> Estimate:
        """Reading and writing ``num_bytes`` in all, in ``launches`` kernels.

        Args:
            kind: one of :data:`planner.extras.kernels.tables.MEMORY_BOUND`.

        Raises:
            UnknownNameError: there is no such kind.
        """
        if kind not in MEMORY_BOUND:
            raise UnknownNameError(f"no kind of operator {kind!r}", [f"known: {', '.join(MEMORY_BOUND)}"])
        if num_bytes <= 0:
            return NOTHING
        return launches * self._estimate(kind, (max(1, round(num_bytes / launches)), 1))

    def _estimate(self, kind: str, extents: tuple[int, ...]) -> Estimate:
        estimate = self._known.get((kind, extents))
        if estimate is None:
            fit, source = self.fits[kind]
            seconds, far = fit.seconds(extents, self.device, self.width)
            widened = min(1 + max(0.0, far - _INSIDE), _MOST_WIDENED) if np.isfinite(far) else 1.0
            low = fit.held_back.low**widened
            high = fit.held_back.high**widened
            if fit.device == ANY_DEVICE:
                evidence = f"{DATASHEET}, {fit.held_back.text}"
            elif fit.uses_neighbours and far <= _NEAR:
                evidence = f"{TABLE}{source}"
            else:
                evidence = f"fitted{source}, {fit.held_back.text}"
            estimate = self._known[kind, extents] = Estimate(seconds, seconds * low, seconds * high, evidence)
        return estimate

    def _attention(self, kind: str, shape: AttentionShape, fused: bool, by: AttentionKernel) -> Estimate:
        batch, heads, _, queries, keys, size, causal = shape
        extents = (*shape[:-1], int(causal))
        if min(extents[:-1]) <= 0:
            return NOTHING
        backward = kind == ATTENTION_BACKWARD
        if fused:
            return self._fused(extents, backward, by)
        products = batch * heads
        scores = self.width * batch * heads * queries * keys
        if not backward:
            softmax = self.memory_bound(2 * scores, kind="softmax")
            return self.gemm(queries, keys, size, products) + softmax + self.gemm(queries, size, keys, products)
        of_scores = self.memory_bound(3 * scores, kind="softmax_backward")
        values = self.gemm(keys, size, queries, products)
        through = self.gemm(queries, keys, size, products)
        return values + through + of_scores + self.gemm(queries, size, keys, products) + values

    def _fused(self, extents: tuple[int, ...], backward: bool, by: AttentionKernel) -> Estimate:
        batch, heads, kv_heads, queries, keys, size, causal = extents
        kind = ATTENTION_BACKWARD if backward else ATTENTION
        if kind in self.fits:
            return self._estimate(kind, extents)
        if by is AttentionKernel.TUNED and backward and TUNED_ATTENTION_BACKWARD in self.fits:
            return self._estimate(TUNED_ATTENTION_BACKWARD, extents)
        if by is AttentionKernel.TUNED and TUNED_ATTENTION in self.fits:
            forward = self._estimate(TUNED_ATTENTION, extents)
            return forward * _TUNED_BACKWARD if backward else forward
        which = "backward" if backward else "forward"
        share = _share_of_size(size, which)
        share = min(share, _FLASH[which]) if by is AttentionKernel.FLASH else share
        share *= _BESIDE_A100.get(self.device.name, {}).get(which, 1.0)
        share *= float(np.interp(np.log(keys), np.log(_LENGTHS), _OF_LENGTH[which]))
        if causal:
            share *= float(np.interp(np.log(keys), np.log(_LENGTHS), _OF_MASK))
        flops = (10 if backward else 4) * batch * heads * queries * keys * size * (0.5 if causal else 1.0)
        passes = 2 if backward else 1
        num_bytes = passes * self.width * batch * size * (2 * heads * queries + 2 * kv_heads * keys)
        compute_s = flops / (self.device.peak_flop_per_s * share)
        memory = self.memory_bound(num_bytes, passes)
        seconds = max(compute_s, memory.seconds) + self.memory_bound(1).seconds
        version = "" if by is AttentionKernel.FLASH else "-2"
        return Estimate(
            seconds, seconds * _FUSED_LOW, seconds * _FUSED_HIGH, f"{DATASHEET}, shares of FlashAttention{version}"
        )


def _share_of_size(size: int, which: str) -> float:
    """Of the peak, what FlashAttention-2 reaches of heads of a size on A100: its kernels are of sizes in steps."""
    shares = _FUSED[which]
    of_kernel = next((each for each in shares if each >= size), max(shares))
    return shares[of_kernel] * (1.0 if size == of_kernel else min(1.0, size / of_kernel) * _BETWEEN[which])


def kernels(device: str, dtype: str = "bfloat16", tables: str | Path | None = None) -> Kernels:
    """The kernels of a device of the catalogue.

    Args:
        dtype: of the operands, as torch names it; ``tfloat32`` is float32 in tensor cores, ``fp8`` one of
            a byte (what is not a product of weights stays wider: take those kernels from a call of their own).
        tables: a table of one's own (:mod:`planner.extras.kernels.tables`), which comes before those that ship.

    Raises:
        UnknownNameError: the catalogue has no such device.
        MissingMeasurementError: no source says how fast it is in that dtype.
        MissingFileError, CorruptFileError: of ``tables``.
    """
    return _kernels(device, "float8" if dtype == "fp8" else dtype, str(tables) if tables is not None else "")


@functools.cache
def _kernels(device: str, dtype: str, tables: str) -> Kernels:
    figures = Device.named(device, dtype)
    return kernels_of(figures, dtype, tuple(fit_rows(read_table(tables))) if tables else ())


def kernels_of(figures: Device, dtype: str, own: Sequence[Fit] = ()) -> Kernels:
    """As :func:`kernels`, of a device by its figures; fits of ``own`` tables come first."""
    every = (*own, *stored_fits())
    kinds = (GEMM, BATCHED, GROUPED, *ATTENTION_KINDS, *MEMORY_BOUND)
    fits_by_kind = {kind: _fit_of(every, figures.name, dtype_of(dtype), kind) for kind in kinds}
    fits = {kind: fit for kind, fit in fits_by_kind.items() if fit is not None}
    for kind in MEMORY_BOUND:
        fits.setdefault(kind, fits[_STAND_INS.get(kind, "elementwise")])
    return Kernels(figures, dtype, WIDTHS[dtype], fits)


def _fit_of(every: Sequence[Fit], name: str, dtype: str, kind: str) -> tuple[Fit, str] | None:
    of_kind = [fit for fit in every if fit.kind == kind]
    chip = next((chip for chip in _CHIPS if name in chip), (name,))
    tables = [fit for device in (name, *chip) for fit in of_kind if fit.device == device and fit.dtype == dtype]
    if kind == GEMM and tables:  # the chip counts, not the memory beside it
        known_best = min(tables, key=lambda fit: fit.held_back.median)
        if 2 * known_best.held_back.median < tables[0].held_back.median:
            tables = [known_best]
    if not tables and kind in MEMORY_BOUND:
        tables = [fit for device in (name, *chip) for fit in of_kind if fit.device == device]
    if tables:
        return tables[0], "" if tables[0].device == name else f" on {tables[0].device}"
    if kind == GROUPED:
        return next(fit for fit in of_kind if fit.device == _GROUPED_ON), f" on {_GROUPED_ON}"
    general = [fit for fit in of_kind if fit.device == ANY_DEVICE and fit.dtype == general_dtype(kind, dtype)]
    return (general[0], "") if general else None
