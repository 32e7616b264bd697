"""What one rank of a plan has to save, under keys that mean the same whatever the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType

from torch import Tensor

from planner.ir.box import Box, intersect, whole

MODEL = "model/"
"""What the keys of parameters and buffers begin with."""

Number = int | float | bool | str | None
Slice = tuple[int, int, tuple[int, ...]]
BoxOf = tuple[Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank.

    Keys name things of the *model*, never of the plan, so that another plan finds them again: ``model/NAME`` a
    parameter or buffer by the model's own name, ``optimizer/NAME/exp_avg`` what the optimiser keeps for it,
    ``group/NAME/lr``, ``scheduler/...`` and ``run/step`` numbers.

    Attributes:
        tensors: by key; the very tensors of the running model, not copies.
        slices: ``(start, stop, shape)`` of each key whose tensor is only a part: the tensor has one dim and is the
            range ``start:stop`` of a whole of that shape, laid flat.
        boxes: ``(box, shape)`` of each key whose tensor is that box of a whole of that shape.
        numbers: by key.
        writes: keys of tensors and numbers that this rank saves.  Over all ranks, each key, slice or box is written by
            one.

    Raises:
        ValueError: a key of ``writes``, ``slices`` or ``boxes`` has no value, is both a tensor and a number, a number
            is something else, or a tensor is not the slice or box that it is said to be.
    """

    tensors: Mapping[str, Tensor]
    slices: Mapping[str, Slice]
    numbers: Mapping[str, Number]
    writes: frozenset[str]
    boxes: Mapping[str, BoxOf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if both := self.tensors.keys() & self.numbers.keys():
            raise ValueError(f"both a tensor and a number: {', '.join(sorted(both))}")
        if missing := self.writes - self.tensors.keys() - self.numbers.keys():
            raise ValueError(f"to be written, but not there: {', '.join(sorted(missing))}")
        for key, number in self.numbers.items():
            if not isinstance(number, (int, float, str, NoneType)):
                raise ValueError(f"{key} is neither number, text, truth value nor None: {number!r}")
        for key, (start, stop, shape) in self.slices.items():
            if key not in self.tensors:
                raise ValueError(f"{key} is a slice, but not there")
            extents = tuple(self.tensors[key].shape)
            if not 0 <= start <= stop <= math.prod(shape) or extents != (stop - start,):
                raise ValueError(f"{key} has shape {extents}; it is said to be {start}:{stop} of {shape}")
        for key, (box, shape) in self.boxes.items():
            if key not in self.tensors or key in self.slices:
                raise ValueError(f"{key} is a box, but not there, or a slice as well")
            extents = tuple(self.tensors[key].shape)
            if extents != tuple(map(len, box)) or (all(extents) and intersect(box, whole(shape)) != box):
                where = " x ".join(map(str, box))
                raise ValueError(f"{key} has shape {extents}; it is said to be {where} of {shape}")


def joined(states: Iterable[RankState]) -> RankState:
    """Everything in ``states`` (those of a rank's stages) as one; where two hold a key, they must hold the same.

    Raises:
        ValueError: two hold different things under one key.
    """
    tensors: dict[str, Tensor] = {}
    slices: dict[str, Slice] = {}
    boxes: dict[str, BoxOf] = {}
    numbers: dict[str, Number] = {}
    writes: set[str] = set()
    for state in states:
        for key, tensor in state.tensors.items():
            if tensors.setdefault(key, tensor) is not tensor and tensors[key].data_ptr() != tensor.data_ptr():
                raise ValueError(f"two stages of a rank have another {key} each")
        for key, number in state.numbers.items():
            if numbers.setdefault(key, number) != number:
                raise ValueError(f"two stages of a rank have another {key} each: {numbers[key]!r}, {number!r}")
        slices.update(state.slices)
        boxes.update(state.boxes)
        writes.update(state.writes)
    return RankState(tensors, slices, numbers, frozenset(writes), boxes)
