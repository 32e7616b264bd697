"""A checkpoint in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.checkpoint.state import Number, RankState


class Saved:
    """What ranks wrote, as a checkpoint gives it back."""

    def __init__(self, *states: RankState) -> None:
        self.parts: dict[str, list[tuple[int, int, Tensor]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.values: dict[str, Number] = {}
        for state in states:
            for key in state.writes:
                if key in state.numbers:
                    assert key not in self.values, f"{key} is written twice"
                    self.values[key] = state.numbers[key]
                    continue
                tensor = state.tensors[key].clone()
                start, stop, shape = state.slices.get(key, (0, tensor.numel(), tuple(tensor.shape)))
                self.parts.setdefault(key, []).append((start, stop, tensor.reshape(-1)))
                self.shapes[key] = shape
        for key, parts in self.parts.items():
            parts.sort(key=lambda part: part[0])
            assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])], f"{key} is written twice"

    def tensors(self) -> set[str]:
        return set(self.parts)

    def numbers(self) -> set[str]:
        return set(self.values)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.shapes[key]

    def read(self, key: str) -> Tensor:
        return torch.cat([part for _, _, part in self.parts[key]]).reshape(self.shapes[key])

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        return self.read(key).reshape(-1)[start:stop]

    def number(self, key: str) -> Number:
        return self.values[key]
