"""A checkpoint in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.ir.box import Box, volume, whole
from runtime.checkpoint.state import Number, RankState
from runtime.pipeline.routing import assemble, slices


class Saved:
    """What ranks wrote, as a checkpoint gives it back."""

    def __init__(self, *states: RankState) -> None:
        self.parts: dict[str, list[tuple[int, int, Tensor]]] = {}
        self.boxes: dict[str, list[tuple[Box, Tensor]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.values: dict[str, Number] = {}
        for state in states:
            for key in state.writes:
                if key in state.numbers:
                    assert key not in self.values, f"{key} is written twice"
                    self.values[key] = state.numbers[key]
                    continue
                tensor = state.tensors[key].clone()
                if key in state.boxes:
                    box, self.shapes[key] = state.boxes[key]
                    self.boxes.setdefault(key, []).append((box, tensor))
                    continue
                start, stop, shape = state.slices.get(key, (0, tensor.numel(), tuple(tensor.shape)))
                self.parts.setdefault(key, []).append((start, stop, tensor.reshape(-1)))
                self.shapes[key] = shape
        for key, parts in self.parts.items():
            parts.sort(key=lambda part: part[0])
            assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])], f"{key} is written twice"

        for key, boxes in self.boxes.items():
            assert sum(volume(box) for box, _ in boxes) == volume(whole(self.shapes[key])), f"{key} is not written once"

    def tensors(self) -> set[str]:
        return {*self.parts, *self.boxes}

    def numbers(self) -> set[str]:
        return set(self.values)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.shapes[key]

    def read(self, key: str) -> Tensor:
        if key in self.boxes:
            pieces = [(box, tensor) for box, tensor in self.boxes[key] if tensor.numel()]
            return assemble(pieces, whole(self.shapes[key]), pieces[0][1].dtype)
        return torch.cat([part for _, _, part in self.parts[key]]).reshape(self.shapes[key])

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        return self.read(key).reshape(-1)[start:stop]

    def read_box(self, key: str, box: Box) -> Tensor:
        return self.read(key)[slices(box, whole(self.shapes[key]))]

    def number(self, key: str) -> Number:
        return self.values[key]
