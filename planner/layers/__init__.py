"""Layer kinds: one module a kind, which states the kind's access relation.  The registry is the folder's listing.

A kind's module has these functions, all pure; boxes are in global coordinates of a micro-batch:

    work(layer, inputs) -> TensorSpec
        the space a layout divides: the output, or, for a reduction such as the loss, what it reduces over
    input_boxes(layer, inputs, work_box) -> tuple[Box, ...]
        which box of each input is read to do ``work_box``; may reach outside the tensor (padding)
    weight_boxes(layer, parameters, work_box) -> tuple[Box, ...]
        which box of each parameter is used; ranks with equal boxes share its gradient
    forward_flops(layer, inputs) -> int
        multiply-adds counted as two, for the shapes given

and ``REDUCTION``: what boxes do not cover: ``""``, ``"sum"`` (parts are partial sums) or ``"statistics"`` (a
normalisation over the samples of all ranks).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Protocol, cast

from planner.ir.box import Box
from planner.ir.errors import UnknownNameError
from planner.ir.graph import Layer, TensorSpec
from planner.layers._samples import check_samples_apart

__all__ = ["Kind", "check_samples_apart", "kind", "kinds"]


class Kind(Protocol):
    """What a module in this folder provides; see the package's description."""

    REDUCTION: str

    def work(self, layer: Layer, inputs: tuple[TensorSpec, ...]) -> TensorSpec:
        """The space a layout divides."""

    def input_boxes(self, layer: Layer, inputs: tuple[TensorSpec, ...], work_box: Box) -> tuple[Box, ...]:
        """The box of each input that is read to do ``work_box``."""

    def weight_boxes(self, layer: Layer, parameters: tuple[TensorSpec, ...], work_box: Box) -> tuple[Box, ...]:
        """The box of each parameter that is used to do ``work_box``."""

    def forward_flops(self, layer: Layer, inputs: tuple[TensorSpec, ...]) -> int:
        """Floating-point operations of the forward pass."""


@functools.cache
def kinds() -> tuple[str, ...]:
    """Names of all layer kinds."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not _is_helper(info.name)))


@functools.cache
def kind(name: str) -> Kind:
    """The module of layer kind ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in kinds():
        raise UnknownNameError(f"no layer kind {name!r}", [f"known: {', '.join(kinds())}"])
    module: ModuleType = importlib.import_module(f"{__name__}.{name}")
    return cast(Kind, module)


_ABOUT_STAGES = ("backward_halo", "boundary", "contraction", "division")
"""Modules that put relations to use."""


def _is_helper(name: str) -> bool:
    return name.startswith("_") or name in _ABOUT_STAGES
