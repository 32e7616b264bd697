"""The registry of layer kinds: each is a class in a module of its family, named where it is written."""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from planner.ir.box import Box, Boxes
from planner.ir.errors import UnknownNameError
from planner.ir.graph import Layer, TensorSpec
from planner.layers._rules import whole_weights

_FAMILIES = ("convolution", "data_movement", "elementwise", "normalization", "products", "sparse")
_KINDS: dict[str, type[Kind]] = {}

DimNames = Literal["space", "input", "sequence", "own"]
"""Where the names of an output's dims are from, see the package's description."""


class Kind(ABC):
    """A layer kind; see the package's description."""

    DIMS: ClassVar[DimNames]
    REDUCTION: ClassVar[str] = ""
    HALO: ClassVar[bool] = False
    CONVOLUTION: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str, dims: DimNames) -> None:
        super().__init_subclass__()
        cls.DIMS = dims
        if name in _KINDS:
            raise ValueError(f"there are two layer kinds {name!r}")
        _KINDS[name] = cls

    @staticmethod
    def work(layer: Layer, inputs: tuple[TensorSpec, ...], /) -> TensorSpec:
        """The space a layout divides: of most kinds their (first) output."""
        return layer.outputs[0]

    @staticmethod
    @abstractmethod
    def input_boxes(layer: Layer, inputs: tuple[TensorSpec, ...], work_box: Box, /) -> Boxes:
        """The box of each input that is read to do ``work_box``."""

    @staticmethod
    def weight_boxes(layer: Layer, parameters: tuple[TensorSpec, ...], work_box: Box, /) -> Boxes:
        """The box of each parameter that is used to do ``work_box``."""
        return whole_weights(layer, parameters, work_box)

    @staticmethod
    def forward_flops(layer: Layer, inputs: tuple[TensorSpec, ...], /) -> int:
        """Floating-point operations of the forward pass; 0 where data is moved, not computed."""
        return 0


@functools.cache
def kinds() -> tuple[str, ...]:
    """Names of all layer kinds."""
    for family in _FAMILIES:
        importlib.import_module(f"{__package__}.{family}")
    return tuple(sorted(_KINDS))


@functools.cache
def kind(name: str) -> Kind:
    """The layer kind ``name``.

    Raises:
        UnknownNameError: there is none.
    """
    for family in _FAMILIES:  # no more of them than it takes
        if name in _KINDS:
            break
        importlib.import_module(f"{__package__}.{family}")
    if name not in _KINDS:
        raise UnknownNameError(f"no layer kind {name!r}", [f"known: {', '.join(kinds())}"])
    return _KINDS[name]()


def has_halo(name: str) -> bool:
    """Whether a layer of that kind reads rows of other ranks that no box tells."""
    return kind(name).HALO


def is_convolution(name: str) -> bool:
    """Whether a layer of that kind sums weighted windows of its input: a halo of it overlaps with what it computes."""
    return kind(name).CONVOLUTION
