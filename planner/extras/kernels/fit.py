"""Fitting curves to tables, and how far they are off on networks that were held back.

Each kind of kernel is fitted for each device and dtype, and asked whether neighbours help: the error on networks that
were held back is taken with them and without, and the smaller is kept.  Networks are held back whole (their rows at all
lengths and tensor degrees; networks of one width count as one), since rows of one say too much about each other.

What ships is fitted once: ``python -m planner.extras.kernels.fit`` writes ``data/fits.json``, which a test compares.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from planner.extras.catalogue.listing import devices, names_of
from planner.extras.kernels.curves import (
    AttentionCurve,
    BytesCurve,
    Curve,
    Device,
    Extents,
    GemmCurve,
    curve_of,
    fitted,
    logs,
)
from planner.extras.kernels.estimates import NO_NEIGHBOURS, HeldBackErrors, MeasuredNeighbours
from planner.extras.kernels.tables import (
    ATTENTION_KINDS,
    DATA,
    GEMM,
    GROUPED,
    TUNED_ATTENTION,
    TUNED_ATTENTION_BACKWARD,
    KernelRow,
    shipped,
)

BATCHED = "batched_gemm"
ANY_DEVICE = "any device"
"""Products of which several are one kernel; what a device is called whose constants are means over the others."""

WIDTHS = {"float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_LEAST_GROUPS = 2
_LEAST_ROWS = 8
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """A kind of kernel on a device in a dtype.

    Attributes:
        held_back: its error on networks that were held back.
        uses_neighbours: whether measured shapes correct the curve.
        curve_error: the median error of the curve alone.
        checked: [rows, 2], of the shapes that were held back: seconds measured, log(predicted / measured); none where
            the fit was read from a file.
    """

    device: str
    dtype: str
    kind: str
    curve: Curve
    held_back: HeldBackErrors
    uses_neighbours: bool
    curve_error: float
    neighbours: MeasuredNeighbours = field(compare=False, repr=False)
    checked: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), compare=False, repr=False)

    def seconds(self, extents: Sequence[int], device: Device, width: int) -> tuple[float, float]:
        """Seconds at a shape, and how far the nearest measured shape is (a sum of logarithms)."""
        place = np.array([extents], dtype=float)
        curve_s = float(self.curve.seconds(place, device, width)[0])
        correction, far = self.neighbours.at(logs(place[0]))
        return curve_s * float(np.exp(-correction)) if self.uses_neighbours else curve_s, far


def fit_rows(rows: Iterable[KernelRow]) -> list[Fit]:
    """The fits of all kinds, devices and dtypes that ``rows`` have enough of; a device must be of the catalogue."""
    fits = []
    for (name, dtype, kind), of_kind in by_kind(rows).items():
        if len(of_kind) >= _LEAST_ROWS:
            fits.append(_fit(Device.named(name, dtype), dtype, kind, of_kind))
    return fits


def by_kind(rows: Iterable[KernelRow]) -> dict[tuple[str, str, str], list[KernelRow]]:
    """Rows by device, dtype and kind of kernel, as they are fitted."""
    tables: dict[tuple[str, str, str], list[KernelRow]] = {}
    for row in rows:
        kind = BATCHED if row.kind == GEMM and row.extents[3] > 1 else row.kind
        tables.setdefault((row.device, row.dtype, kind), []).append(row)
    return tables


def arrays(rows: Sequence[KernelRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Extents, seconds and groups of rows of one kind."""
    return (
        np.array([row.extents for row in rows], dtype=float),
        np.array([row.seconds for row in rows]),
        np.array([row.group for row in rows]),
    )


_CURVES: Mapping[str, type[Curve]] = {
    GEMM: GemmCurve,
    BATCHED: GemmCurve,
    GROUPED: GemmCurve,
    **dict.fromkeys(ATTENTION_KINDS, AttentionCurve),
}


def _fit(device: Device, dtype: str, kind: str, rows: Sequence[KernelRow]) -> Fit:
    extents, seconds, groups = arrays(rows)
    curve_kind = _CURVES.get(kind, BytesCurve)
    width = WIDTHS[dtype]
    if len(set(groups)) < _LEAST_GROUPS:  # one network
        groups = _every_other(extents)
    names = sorted(set(groups))
    parts = [set(names[start::_FOLDS]) for start in range(min(_FOLDS, len(names)))]
    plain: list[float] = []
    measured: list[float] = []
    helped: list[float] = []
    for part in parts:
        out = np.array([group in part for group in groups])
        curve = fitted(curve_kind, extents[~out], seconds[~out], device, width)
        errors = np.log(curve.seconds(extents, device, width) / seconds)
        plain += errors[out].tolist()
        measured += seconds[out].tolist()
        helped += _with_neighbours(extents, errors, out)
    of_curve = HeldBackErrors.of(plain)
    of_both = HeldBackErrors.of(helped)
    curve = fitted(curve_kind, extents, seconds, device, width)
    near = MeasuredNeighbours(logs(extents), np.log(curve.seconds(extents, device, width) / seconds))
    uses = of_both.median <= of_curve.median
    checked = np.array([measured, helped if uses else plain]).T
    return Fit(device.name, dtype, kind, curve, of_both if uses else of_curve, uses, of_curve.median, near, checked)


def _every_other(extents: Extents) -> np.ndarray:
    """Two groups of shapes, one and the next by size."""
    order = np.argsort(np.argsort(extents.prod(axis=1), kind="stable"), kind="stable")
    return np.array([str(place % 2) for place in order])


def _with_neighbours(extents: Extents, errors: np.ndarray, out: np.ndarray) -> list[float]:
    """What is left of errors of rows ``out`` once those of the others near them are taken off."""
    near = MeasuredNeighbours(logs(extents[~out]), errors[~out])
    return [error - near.at(place)[0] for error, place in zip(errors[out], logs(extents[out]), strict=True)]


def as_json(fits: Iterable[Fit]) -> list[dict[str, Any]]:
    """What is stored of fits: all but the rows."""
    return [
        {
            "device": fit.device,
            "dtype": fit.dtype,
            "kind": fit.kind,
            "curve": {key: _rounded(value) for key, value in asdict(fit.curve).items()},
            "held_back": asdict(fit.held_back),
            "uses_neighbours": fit.uses_neighbours,
            "curve_error": fit.curve_error,
        }
        for fit in fits
    ]


def _rounded(value: Any) -> Any:
    return [_rounded(each) for each in value] if isinstance(value, (tuple, list)) else float(f"{value:.4g}")


def from_json(nodes: Iterable[Mapping[str, Any]], rows: Iterable[KernelRow]) -> list[Fit]:
    """The reverse of :func:`as_json`; neighbours are the ``rows``, which are those of the fit."""
    tables = by_kind(rows)
    fits = []
    for node in nodes:
        name = node["device"]
        dtype = node["dtype"]
        kind = node["kind"]
        curve = curve_of(node["curve"])
        near = NO_NEIGHBOURS
        if name != ANY_DEVICE:
            extents, seconds, _ = arrays(tables[name, dtype, kind])
            errors = np.log(curve.seconds(extents, Device.named(name, dtype), WIDTHS[dtype]) / seconds)
            near = MeasuredNeighbours(logs(extents), errors)
        held_back = HeldBackErrors(**node["held_back"])
        fits.append(Fit(name, dtype, kind, curve, held_back, node["uses_neighbours"], node["curve_error"], near))
    return fits


def general(fits: Sequence[Fit], rows: Iterable[KernelRow]) -> list[Fit]:
    """By kind, the mean constants over devices; held back is each device, given the means of the others.

    Products without tensor cores, which are nearer to their lower peak, are apart from those in them, and those in 8
    bits, of which a part is casts, from wider ones.  Attention of a maker's library is of one chip's own instructions;
    of experts' products the tiles of one device are not another's.
    """
    tables = by_kind(rows)
    general_fits = []
    of_any = [fit for fit in fits if fit.kind not in (TUNED_ATTENTION, TUNED_ATTENTION_BACKWARD, GROUPED)]
    sorts = dict.fromkeys((fit.kind, general_dtype(fit.kind, fit.dtype)) for fit in of_any)
    for kind, dtype in sorts:
        of_kind = [fit for fit in fits if (fit.kind, general_dtype(fit.kind, fit.dtype)) == (kind, dtype)]
        errors_of: list[float] = []
        for fit in of_kind:
            others = [each.curve for each in of_kind if each.device != fit.device]
            if others:
                extents, seconds, _ = arrays(tables[fit.device, fit.dtype, kind])
                device = Device.named(fit.device, fit.dtype)
                errors = np.log(mean_curve(others).seconds(extents, device, WIDTHS[fit.dtype]) / seconds)
                errors_of += np.quantile(errors, np.linspace(0.05, 0.95, 19)).tolist()  # a device counts once
        if errors_of:
            error = HeldBackErrors.of(errors_of)
            curve = mean_curve([fit.curve for fit in of_kind])
            general_fits.append(Fit(ANY_DEVICE, dtype, kind, curve, error, False, error.median, NO_NEIGHBOURS))
    return general_fits


def general_dtype(kind: str, dtype: str) -> str:
    """The dtype for which a device without tables has constants of its own; empty: others in tensor cores, or any."""
    if kind == GEMM and dtype == "float8":
        return dtype
    return "float32" if kind in (GEMM, BATCHED) and dtype in ("float32", "float64") else ""


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Geometric means of the constants of curves of one sort."""
    nodes = [asdict(curve) for curve in curves]

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return [mean(each) for each in zip(*values, strict=True)]
        return float(np.exp(np.mean(np.log(np.maximum(values, 1e-9)))))

    return curve_of({name: mean([node[name] for node in nodes]) for name in nodes[0]})


STORED = DATA / "fits.json"


@functools.cache
def stored_fits() -> tuple[Fit, ...]:
    """The fits that ship."""
    return tuple(from_json(json.loads(STORED.read_text("utf-8")), shipped()))


def write_stored() -> None:
    """Fits the tables that ship, of devices that the catalogue knows, and writes what :func:`stored_fits` reads."""
    rows = known_rows(shipped())
    fits = fit_rows(rows)
    nodes = as_json([*fits, *general(fits, rows)])
    STORED.write_text("[\n" + ",\n".join(json.dumps(node) for node in nodes) + "\n]\n", "utf-8")


def known_rows(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """Those of devices of which the catalogue has a peak in their dtype; others there is nothing to compare with."""
    peaks = {name: devices()[entry].peak_flop_per_s for name, entry in names_of(devices().values()).items()}
    return [row for row in rows if row.dtype in peaks.get(row.device.lower(), {})]


if __name__ == "__main__":
    argparse.ArgumentParser(description=write_stored.__doc__).parse_args()
    write_stored()
