"""What a kernel takes by its shape: curves of a few constants a device, fitted to tables.

A product C[m, n] = A[m, k] B[k, n], ``batch`` of them, on P processors of R operations a second each:

    tiles       T = batch ceil(m / a) ceil(n / b)          for each tile a x b of TILES
    waves       W = q ceil(T / P) + (1 - q) max(T / P, 1)  the last wave is cut short, as far as kernels let it
    compute     W 2 a b (k + k0) / (R e)                   k0: what filling and draining the pipeline costs
    memory      bytes of A, B and C / (bandwidth u)
    time        t0 + (min over tiles compute**4 + memory**4)**(1/4)

Fitted are e by area of the tile, q, k0, u and t0.  What memory bounds takes t0 launches + bytes / (bandwidth u).
What shapes near by were measured to take beside the curve corrects it
(:class:`planner.extras.kernels.estimates.MeasuredNeighbours`).

Ignored: transposes of A and B (the three products of a layer differ in them), algorithms that divide k over processors,
clocks that fall as chips grow hot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.extras.catalogue.listing import device as catalogue_device
from planner.ir.errors import MissingMeasurementError

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_AREAS = (0, 0, 1, 2, 2, 3)
"""Which of the fitted rates a tile has."""

_PROCESSORS = {
    "A100-40GB": 108,
    "A100-80GB": 108,
    "A40": 84,
    "B200": 148,
    "B300": 148,
    "GB200": 152,
    "GB300": 152,
    "GH200-96GB": 132,
    "H100-96GB": 132,
    "H100-PCIe": 114,
    "H100-SXM": 132,
    "H200": 132,
    "L4": 58,
    "L40S": 142,
    "MI250X": 220,
    "MI250X-GCD": 110,
    "MI300X": 304,
    "RTX-2080": 46,
    "RTX-3090": 82,
    "RTX-4090": 128,
    "T4": 40,
    "Titan-RTX": 72,
    "Titan-V": 80,
    "Titan-Xp": 30,
    "V100-16GB": 80,
    "V100-32GB": 80,
}
"""Streaming multiprocessors (compute units) as the makers' documents of each chip state them; 1 stands for a device of
which none is known: then nothing is rounded up to waves."""


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of a data sheet.

    Attributes:
        peak_flop_per_s: in the dtype asked for.
    """

    name: str
    peak_flop_per_s: float
    memory_bytes_per_s: float
    num_processors: int

    @classmethod
    def named(cls, name: str, dtype: str) -> Device:
        """Of the catalogue.

        Raises:
            UnknownNameError: there is no such device.
            MissingMeasurementError: no source states a figure.
        """
        entry = catalogue_device(name)
        peaks = entry.peak_flop_per_s
        wanted = {"bfloat16": ("bfloat16", "float16"), "float16": ("float16", "bfloat16")}.get(dtype, (dtype,))
        peak = next((peaks[each].value for each in wanted if each in peaks), 0.0)
        bandwidth = entry.memory_bytes_per_s.value if entry.memory_bytes_per_s is not None else None
        return cls.of(entry.name, {dtype: peak}, bandwidth, dtype)

    @classmethod
    def of(cls, name: str, peaks: Mapping[str, float], memory_bytes_per_s: float | None, dtype: str) -> Device:
        """By figures; errors as of :meth:`named`."""
        if not peaks.get(dtype):
            raise MissingMeasurementError(
                f"nothing says how fast {name} computes in {dtype}",
                ["the catalogue has no such figure of it"],
                [f"another --dtype, or in a cluster file: peak: {{{dtype}: 100TFLOP/s}}"],
            )
        if not memory_bytes_per_s:
            raise MissingMeasurementError(
                f"nothing says how fast the memory of {name} is",
                ["the catalogue has no such figure of it"],
                ["in a cluster file: memory-bandwidth: 20GB/s"],
            )
        return cls(name, peaks[dtype], memory_bytes_per_s, _PROCESSORS.get(name, 1))


Extents = np.ndarray
"""[rows, extents]: of products m, n, k, batch; of what memory bounds bytes, launches."""


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """The constants of products.

    Attributes:
        launch_s: t0.
        depth: k0.
        memory_share: u.
        whole_waves: q.
        rates: e of tiles, by falling area.
    """

    launch_s: float
    depth: float
    memory_share: float
    whole_waves: float
    rates: tuple[float, ...]

    START = (1.0, 1.0, 1.0, 0.0, 1.5, 1.0, 0.5, 0.0)
    """Where a fit begins, as :meth:`of` reads it."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> GemmCurve:
        """From numbers without bounds, which a fit moves."""
        launch, depth, *shares = (float(number) for number in numbers)
        memory, waves, *rates = (1 / (1 + float(np.exp(-share))) for share in shares)
        return cls(1e-6 * float(np.exp(launch)), 32 * float(np.exp(depth)), memory, waves, tuple(rates))

    def seconds(self, extents: Extents, device: Device, width: int) -> np.ndarray:
        """[rows]; ``width``: bytes of a number."""
        m, n, k, batch = extents.T.astype(float)
        times = []
        for (rows, columns), area in zip(TILES, _AREAS, strict=True):
            waves = batch * np.ceil(m / rows) * np.ceil(n / columns) / device.num_processors
            waves = self.whole_waves * np.ceil(waves) + (1 - self.whole_waves) * np.maximum(waves, 1)
            rate = device.peak_flop_per_s / device.num_processors * self.rates[area]
            times.append(waves * 2 * rows * columns * (k + self.depth) / rate)
        compute = np.minimum.reduce(times)
        memory = width * batch * (m * k + k * n + m * n) / (device.memory_bytes_per_s * self.memory_share)
        return np.asarray(self.launch_s + (compute**4 + memory**4) ** 0.25)


@dataclass(frozen=True, slots=True)
class BytesCurve:
    """The constants of a kind of operator that memory bounds: t0 and u."""

    launch_s: float
    memory_share: float

    START = (0.5, 1.0)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> BytesCurve:
        """As of :class:`GemmCurve`; caches may be faster than the memory, up to twice."""
        return cls(1e-6 * float(np.exp(numbers[0])), 2 / (1 + float(np.exp(-numbers[1]))))

    def seconds(self, extents: Extents, device: Device, width: int = 0) -> np.ndarray:
        """[rows]."""
        num_bytes, launches = extents.T.astype(float)
        return np.asarray(self.launch_s * launches + num_bytes / (device.memory_bytes_per_s * self.memory_share))


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """The constants of fused attention: t0, and the share of the peak that its products reach."""

    launch_s: float
    share: float

    START = (2.0, 0.0)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> AttentionCurve:
        """As of :class:`GemmCurve`."""
        return cls(1e-6 * float(np.exp(numbers[0])), 1 / (1 + float(np.exp(-numbers[1]))))

    def seconds(self, extents: Extents, device: Device, width: int = 0) -> np.ndarray:
        """[rows], of a forward; what a backward multiplies more is in its share."""
        batch, heads, _, queries, keys, size, causal = extents.T.astype(float)
        flops = 4 * batch * heads * queries * keys * size * np.where(causal > 0, 0.5, 1.0)
        return np.asarray(self.launch_s + flops / (device.peak_flop_per_s * self.share))


Curve = GemmCurve | BytesCurve | AttentionCurve
_MOST_STEPS = 25
_ROBUST = 0.1


def fitted(kind: type[Curve], extents: Extents, seconds: np.ndarray, device: Device, width: int) -> Curve:
    """The curve with the least robust sum of squares of log(curve / measured)."""
    from scipy.optimize import least_squares  # late: only a fit needs it

    def residuals(numbers: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(kind.of(list(numbers)).seconds(extents, device, width) / seconds))

    start = np.array(kind.START)
    optimum = least_squares(
        residuals, start, loss="soft_l1", f_scale=_ROBUST, max_nfev=_MOST_STEPS, bounds=(start - 8, start + 8)
    )
    return kind.of(list(optimum.x))


def logs(extents: Extents) -> np.ndarray:
    """Where shapes lie among others; a switch that is off is half of one that is on."""
    return np.asarray(np.log(np.maximum(extents, 0.5)))


def curve_of(node: Mapping[str, object]) -> Curve:
    """What :func:`dataclasses.asdict` made of a curve."""
    kind: Callable[..., Curve] = (
        GemmCurve if "rates" in node else BytesCurve if "memory_share" in node else AttentionCurve
    )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in node.items()})
