"""What a layer kind needs to know of an operator: its attributes, from the arguments of a traced call.

A rule takes the call and its arguments by the names of the schema; it answers None where it finds the operator in a
form that its kind does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.graph import MIXES_SAMPLES, Attribute
from planner.layers.loss import ELEMENTS, PLACES
from profiler.naming import operation
from profiler.operators import MEANS_OVER_ELEMENTS, MEANS_OVER_PLACES

Arguments = Mapping[str, Any]
Attributes = dict[str, Attribute]
_MEAN = 1  # of torch's ways to reduce a loss

Rule = Callable[[fx.Node, Arguments], Attributes | None]


def rank_of(value: Any) -> int:
    """Number of dims of a traced tensor; -1 for what is none."""
    return value.meta["val"].ndim if isinstance(value.meta["val"], Tensor) else -1


def embedding(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Gradients that are divided by how often an entry is asked for need all samples."""
    return {MIXES_SAMPLES: True} if arguments.get("scale_grad_by_freq") else {}


def nothing(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Its kind asks for nothing."""
    return {}


def conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window; of an odd margin the odd one is at the end, where windows say by themselves how far they reach."""
    kernel = tuple(int(size) for size in arguments["weight"].meta["val"].shape[2:])
    space = len(kernel)
    dilation = _each(arguments["dilation"], space)
    padding = arguments["padding"]
    if isinstance(padding, str):
        margins = [rate * (size - 1) if padding == "same" else 0 for rate, size in zip(dilation, kernel, strict=True)]
        padding = [margin // 2 for margin in margins]
    return {
        "kernel": kernel,
        "stride": _each(arguments["stride"], space),
        "padding": _each(padding, space),
        "dilation": dilation,
        "groups": int(arguments["groups"]),
    }


def transposed_conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window of its adjoint."""
    space = arguments["weight"].meta["val"].ndim - 2
    return {**(conv(node, arguments) or {}), "output_padding": _each(arguments["output_padding"], space)}


def pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window."""
    space = _space(node)
    kernel = _each(arguments["kernel_size"], space)
    return {
        "kernel": kernel,
        "stride": _each(arguments.get("stride") or kernel, space),
        "padding": _each(arguments["padding"], space),
        "dilation": _each(arguments.get("dilation", 1), space),
        "ceil_mode": bool(arguments["ceil_mode"]),
    }


def adaptive_pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The size of the output."""
    space = _space(node)
    sizes = node.meta["val"].shape[-space:] if rank_of(node) > 0 else ()
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return {"output_size": tuple(int(size) for size in sizes)} if sizes else {}


def is_pool_of_all_space(node: fx.Node, arguments: Arguments) -> bool:
    """Whether an average leaves one number a channel, ``[sample, channel, *space]`` being its input."""
    rank = rank_of(arguments["self"])
    if operation(node) == "mean":
        dims = arguments.get("dim") or ()
        return 3 <= rank <= 5 and {int(dim) % rank for dim in dims} == set(range(2, rank))
    return rank == _space(node) + 2 and all(isinstance(size, int) and size == 1 for size in arguments["output_size"])


def reduction(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The dims that are reduced; None where these are all."""
    rank = rank_of(arguments["self"])
    named = arguments.get("dim")
    dims = (named,) if isinstance(named, int) else tuple(named or ())
    if not dims or not all(isinstance(place, int) for place in dims):
        return None
    return {"dims": tuple(sorted(place % rank for place in dims)), "keeps": bool(arguments.get("keepdim", False))}


def batch_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Whether it normalises by the batch."""
    return {"training": bool(arguments["training"])}


def layer_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The dims that it normalises over."""
    rank = rank_of(node)
    return {"dims": tuple(range(rank - len(arguments["normalized_shape"]), rank))}


def group_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """All dims but the samples, in groups of channels."""
    return {"dims": tuple(range(1, rank_of(node))), "groups": int(arguments["num_groups"]), "by_channel": True}


def instance_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The dims of space; not with running statistics, which are over samples."""
    if arguments["running_mean"] is not None:
        return None
    return {"dims": tuple(range(2, rank_of(node))), "by_channel": True}


def dim(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The one dim that it is about."""
    return {"dim": int(arguments["dim"]) % rank_of(node)}


def recurrence(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Layers and directions."""
    names = ("bidirectional", "batch_first")
    return {name: bool(arguments[name]) for name in names} | {"num_layers": int(arguments["num_layers"])}


def loss(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """What it is a mean over."""
    name = operation(node)
    if arguments.get("reduction", _MEAN) != _MEAN:
        return {}
    if name in MEANS_OVER_ELEMENTS:
        return {"terms": ELEMENTS}
    return {"terms": PLACES} if name in MEANS_OVER_PLACES else {}


def _space(node: fx.Node) -> int:
    """Dims of space, which the operator's name ends with: ``avg_pool2d``."""
    return int(operation(node).split("pool")[1][0])


def _each(value: Any, space: int) -> tuple[int, ...]:
    """One number a dim of space, as the operator reads it: a single number stands for all."""
    numbers: Sequence[Any] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(number) for number in (numbers * space if len(numbers) == 1 else numbers))
