"""A part of one layer: its operator, and the pieces of tensors that it is called with.

The part lies in the middle of space, where it has neighbours on both sides: its inputs hold the halo that the access
relation says, and its operator does not pad there.  A convolution for which torch would take a plain loop runs in
oneDNN, as it does on the ranks of a divided stage.  Pieces are of what the whole network really computes, so that
indices, labels and the zeros behind a ReLU are as they are; of parameters and running statistics likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.onednn import onednn_convolution, runs_in_a_loop
from cuda_ops.recurrent import autocast
from planner.ir.box import volume, whole
from planner.ir.graph import Layer
from planner.ir.profile import PartShape
from profiler.capture import Captured
from profiler.grouping import is_output_of
from profiler.kinds import arguments_of
from profiler.part_arguments import local_arguments
from profiler.pieces import NoPieceError, Operand, Pieces, ValueOf
from profiler.segments import Segment

_OPTIONS = ("stride", "padding", "dilation", "groups")
_ATTRIBUTES = {"padding", "output_padding", "groups"}
"""Arguments that are attributes as well."""
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)  # what operators raise for shapes they cannot take


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """A part that can be run.

    Attributes:
        layer: with local attributes and outputs; ``inputs`` and ``parameters`` are the whole layer's names.
        main: the node of the whole network that makes the outputs; ``outputs``: those that pick one.
        target, args, keywords: the call; tensors are operands.
        share: of the work of the whole layer, at as many samples as the pieces are cut from.
    """

    layer: Layer
    main: fx.Node
    outputs: tuple[fx.Node, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    share: float


def local_part(
    captured: Captured, value_of: ValueOf, samples: int, segment: Segment, shape: PartShape
) -> LocalPart | None:
    """The part of ``segment`` that ``shape`` says; None where its operator cannot be run on a piece alone.

    Args:
        samples: of the pass that ``value_of`` knows, at least those of the part.
    """
    main = _main(segment)
    if main is None:
        return None
    try:
        pieces = Pieces.of(captured.graph, value_of, samples, segment.name, shape)
        return _made(captured, segment, main, pieces)
    except NoPieceError:
        return None


def _main(segment: Segment) -> fx.Node | None:
    """The operator that makes the outputs, if it needs no other of its layer (others only count batches, say)."""
    made = {node.args[0] if is_output_of(node) else node for node in segment.results}
    main = made.pop() if made else None
    if made or main is None or not isinstance(main.target, torch._ops.OpOverload):
        return None
    return main if not set(main.all_input_nodes) & set(segment.calls) else None


def _made(captured: Captured, segment: Segment, main: fx.Node, pieces: Pieces) -> LocalPart | None:
    arguments = arguments_of(main)
    changed = local_arguments(pieces.local(arguments))
    if changed is None or not pieces.reads:
        return None
    attributes = {**pieces.layer.attributes, **{name: _plain(changed[name]) for name in _ATTRIBUTES & changed.keys()}}
    args, keywords = fx.node.map_arg((main.args, dict(main.kwargs)), pieces.operand)
    names = [argument.name for argument in main.target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **keywords}
    args = tuple(changed.pop(name) if name in changed else value for name, value in zip(names, args, strict=False))
    keywords = {**keywords, **changed}
    target: Callable[..., Any] = main.target
    if isinstance(arguments.get("padding"), str):
        target = main.target.overloadpacket.default  # ``same`` and ``valid`` as numbers
    if pieces.layer.kind == "conv" and captured.autocast is None:
        tensors, options = [given["input"], given["weight"]], [attributes[name] for name in _OPTIONS]
        if runs_in_a_loop(*(each.value for each in tensors), *options):
            target, args, keywords = onednn_convolution, (*tensors, given.get("bias"), *options), {}
    part = LocalPart(
        replace(pieces.layer, attributes=attributes),
        main,
        tuple(node for node in segment.calls if is_output_of(node) and node.args[0] is main),
        target,
        args,
        keywords,
        volume(pieces.box) / max(1, volume(whole(pieces.work.shape))),
    )
    results = _tried(captured, part)
    same = pieces.work.shape == pieces.layer.outputs[0].shape and pieces.work.dims == pieces.layer.outputs[0].dims
    if not results or (same and tuple(results[0].shape) != tuple(len(interval) for interval in pieces.box)):
        return None
    specs = tuple(replace(a, shape=tuple(b.shape)) for a, b in zip(pieces.layer.outputs, results, strict=False))
    return replace(part, layer=replace(part.layer, outputs=specs))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


@torch.no_grad()
def _tried(captured: Captured, part: LocalPart) -> tuple[Tensor, ...]:
    """What the call gives; nothing if the operator refuses such pieces."""
    args, keywords = fx.node.map_aggregate((part.args, part.keywords), tensor_of)
    device = next((each.value.device.type for each in operands(part)), "cpu")
    with autocast(device, captured.autocast):
        try:
            found = part.target(*args, **keywords)
        except _REFUSALS:
            return ()
    return (found,) if isinstance(found, Tensor) else tuple(each for each in found if isinstance(each, Tensor))


def operands(part: LocalPart) -> list[Operand]:
    """All of a part's operands, each once, in the order of the call."""
    found: dict[Operand, None] = {}
    fx.node.map_aggregate(
        (part.args, part.keywords), lambda each: found.setdefault(each) if isinstance(each, Operand) else None
    )
    return list(found)


def tensor_of(argument: Any) -> Any:
    """An operand's tensor; anything else as it is."""
    return argument.value if isinstance(argument, Operand) else argument
