"""Recurrent layers over packed sequences, as one operator over padded ones and their lengths.

    user:      y, (h, c) = lstm(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
               y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.size(1))
    captured:  y, h, c = halopipe::packed_recurrence(x, n, [], [w, ...], "lstm", ...)

A packed sequence has as many rows as there are tokens, sorted by the lengths of all samples: nothing that could be cut
by samples.  The operator packs what it is given, runs torch's own recurrence and pads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from cuda_ops._torch import FakeTensor, check
from cuda_ops.dense.operators import define_operator

_PACK, _PAD = (
    FunctionType(each.__code__, each.__globals__, each.__name__, each.__defaults__)
    for each in (rnn.pack_padded_sequence, rnn.pad_packed_sequence)
)
"""torch's own, whatever a capture puts in their places meanwhile."""


class PackedSequenceError(ValueError):
    """A use of packed sequences that is not captured; the text says which, and what to write instead."""


@dataclass(frozen=True, slots=True)
class PaddedSequence:
    """What a capture has in place of a ``PackedSequence``: ``[sample, time, ...]``, or time first, and lengths."""

    padded: Tensor
    lengths: Tensor
    batch_first: bool

    def __getattr__(self, name: str) -> Any:
        if name not in rnn.PackedSequence._fields:
            raise AttributeError(name)
        raise PackedSequenceError(f"forward reads .{name} of a packed sequence: pad it first, with total_length")

    def __iter__(self) -> Iterator[Any]:
        raise PackedSequenceError("forward takes a packed sequence apart: pad it first, with total_length")


@contextmanager
def packed_as_padded() -> Iterator[None]:
    """Within it tensors without data are packed by being left as they are; those with data as ever."""
    functions: Any = (rnn.pack_padded_sequence, rnn.pad_packed_sequence)
    classes: Any = (nn.LSTM, nn.GRU, nn.RNN)
    codes = [each.__code__ for each in functions]
    forwards = [each.forward for each in classes]
    for each, ours in zip(functions, (_pack_here, _pad_here), strict=True):
        each.__code__ = ours.__code__  # whoever has imported the function by its name calls the same object
    for cls, forward in zip(classes, forwards, strict=True):
        cls.forward = _of_padded(forward)
    try:
        yield
    finally:
        for each, code in zip(functions, codes, strict=True):
            each.__code__ = code
        for cls, forward in zip(classes, forwards, strict=True):
            cls.forward = forward


def _pack_here(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    import sys  # this code runs among the names of torch's module

    return sys.modules["cuda_ops.dense.packed"].pack(input, lengths, batch_first, enforce_sorted)


def _pad_here(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> Any:
    import sys

    return sys.modules["cuda_ops.dense.packed"].pad(sequence, batch_first, padding_value, total_length)


def pack(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """``pack_padded_sequence``; a :class:`PaddedSequence` of tensors without data.

    Raises:
        PackedSequenceError: the lengths are numbers of Python, which would be those of the example for ever.
    """
    if not isinstance(input, FakeTensor):
        return _PACK(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        raise PackedSequenceError("pack_padded_sequence is given lengths as a list: give them as a tensor of integers")
    return PaddedSequence(input, lengths.to(torch.int64), batch_first)


def pad(sequence: Any, batch_first: bool, padding_value: float, total_length: int | None) -> Any:
    """``pad_packed_sequence``.

    Raises:
        PackedSequenceError: no ``total_length``: how long the result is would depend on the batch, and on its parts.
    """
    if not isinstance(sequence, PaddedSequence):
        return _PAD(sequence, batch_first, padding_value, total_length)
    time = int(sequence.batch_first)
    if total_length is None:
        raise PackedSequenceError(
            "pad_packed_sequence without total_length makes a tensor as long as the longest sequence of the batch: "
            f"total_length=x.size({time}) of what was packed"
        )
    check(sequence.padded.shape[time] == total_length)
    places = torch.arange(sequence.padded.shape[time], device=sequence.padded.device)
    lengths = sequence.lengths.to(places.device)
    is_there = places < lengths.unsqueeze(1) if time else places.unsqueeze(1) < lengths
    is_there = is_there.view(*is_there.shape, *(1 for _ in sequence.padded.shape[2:]))
    padded = torch.where(is_there, sequence.padded, padding_value)
    return (padded if batch_first == sequence.batch_first else padded.transpose(0, 1)), sequence.lengths


def _of_padded(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent(module: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PaddedSequence):
            return forward(module, input, hx)
        if module.dropout and module.training and module.num_layers > 1:
            raise PackedSequenceError("a packed recurrence drops values between its layers: dropout=0 there")
        states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
        weights = [weight for layer in module.all_weights for weight in layer]
        width = module.proj_size or module.hidden_size
        padded, *ends = torch.ops.halopipe.packed_recurrence(
            input.padded,
            input.lengths,
            states,
            weights,
            module.mode.lower(),
            [width, module.hidden_size] if module.mode == "LSTM" else [width],
            module.num_layers,
            module.bias,
            module.training,
            module.bidirectional,
            input.batch_first,
        )
        result = PaddedSequence(padded, input.lengths, input.batch_first)
        return result, (tuple(ends) if module.mode == "LSTM" else ends[0])

    return recurrent


def _run(
    input: Tensor,
    lengths: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    widths: Sequence[int],
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    time = int(batch_first)
    directions = 2 if bidirectional else 1
    ends_of = (num_layers * directions, input.shape[1 - time])
    shapes = [(*input.shape[:2], directions * widths[0]), *((*ends_of, width) for width in widths)]
    if isinstance(input, FakeTensor):
        return [input.new_empty(shape) for shape in shapes]
    if not input.shape[1 - time]:
        return _without_samples(input, weights, shapes)
    sequence = _PACK(input, lengths.cpu(), batch_first, False)
    beginnings = [each.index_select(1, sequence.sorted_indices) for each in states]
    beginnings = beginnings or [input.new_zeros(shape) for shape in shapes[1:]]
    hx = beginnings if mode == "lstm" else beginnings[0]
    data, *ends = getattr(torch.ops.aten, mode).data(
        sequence.data, sequence.batch_sizes, hx, weights, has_biases, num_layers, 0.0, train, bidirectional
    )
    result = rnn.PackedSequence(data, sequence.batch_sizes, sequence.sorted_indices, sequence.unsorted_indices)
    padded = _PAD(result, batch_first, 0.0, input.shape[time])[0]
    return [padded, *(each.index_select(1, sequence.unsorted_indices) for each in ends)]


def _without_samples(input: Tensor, weights: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The results on a rank that has none, with gradients of 0."""
    nothing = sum((each.sum() for each in weights), input.sum()) * 0
    return [input.new_zeros(shape) + nothing for shape in shapes]


define_operator(
    "packed_recurrence(Tensor input, Tensor lengths, Tensor[] states, Tensor[] weights, str mode, int[] widths, "
    "int num_layers, bool has_biases, bool train, bool bidirectional, bool batch_first) -> Tensor[]",
    _run,
    _run,
)
