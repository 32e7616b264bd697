"""The registry of layer kinds: the package's modules, but for helpers."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from planner.ir.box import Box
from planner.ir.errors import UnknownNameError
from planner.ir.graph import Layer, TensorSpec


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
    return tuple(
        sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if not _is_helper(info.name))
    )


@functools.cache
def kind(name: str) -> Kind:
    """The module of layer kind ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in kinds():
        raise UnknownNameError(f"no layer kind {name!r}", [f"known: {', '.join(kinds())}"])
    module: ModuleType = importlib.import_module(f"{__package__}.{name}")
    return cast(Kind, module)


def has_halo(name: str) -> bool:
    """Whether a layer of that kind reads rows of other ranks that no box tells."""
    return bool(getattr(kind(name), "HALO", False))


def is_convolution(name: str) -> bool:
    """Whether a layer of that kind sums weighted windows of its input: a halo of it hides behind what it computes."""
    return bool(getattr(kind(name), "CONVOLUTION", False))


_ABOUT_STAGES = ("backward_halo", "boundary", "contraction", "division", "fitting")
"""Modules that put relations to use."""


def _is_helper(name: str) -> bool:
    return name.startswith("_") or name in _ABOUT_STAGES
