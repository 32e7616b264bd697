"""Which kind of layer an operator is, and what its kind needs to know: from ``aten`` to ``planner.layers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.graph import Attribute
from profiler.naming import operation

Arguments = Mapping[str, Any]
Attributes = dict[str, Attribute]

OPAQUE = "opaque"
POINTWISE = "pointwise"
LOSS = "loss"

_LOSSES = frozenset(
    [
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy_loss",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "multi_margin_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "mean",
        "sum",
    ]
)
_POINTWISE = frozenset(
    [
        "alias",
        "alpha_dropout",
        "clone",
        "contiguous",
        "detach",
        "dropout",
        "elu",
        "feature_dropout",
        "gelu",
        "glu_jvp",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "lift_fresh_copy",
        "log_sigmoid",
        "mish",
        "native_dropout",
        "prelu",
        "relu",
        "relu6",
        "rrelu",
        "selu",
        "silu",
        "softplus",
        "to",
        "to_copy",
        "type_as",
    ]
)
_RESHAPES = frozenset(
    [
        "broadcast_tensors",
        "expand",
        "expand_as",
        "flatten",
        "movedim",
        "permute",
        "reshape",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "transpose",
        "unflatten",
        "unsafe_view",
        "unsqueeze",
        "view",
        "view_as",
    ]
)


def kind_of(node: fx.Node) -> tuple[str, Attributes]:
    """The kind of the operator that ``node`` calls, and its attributes (``op`` among them)."""
    name = operation(node)
    op: Attributes = {"op": str(node.target)}
    if not isinstance(node.target, torch._ops.OpOverload):
        return OPAQUE, op
    arguments = arguments_of(node)
    if name in _RULES:
        kind, rule = _RULES[name]
        found = None if _varies(arguments) else rule(node, arguments)
        return (OPAQUE, op) if found is None else (kind, {**found, **op})
    if name in _LOSSES and _rank(node) == 0 and _is_mean_over_all(arguments):
        return LOSS, op
    if name in _RESHAPES:
        return "reshape", op
    if name in _POINTWISE or torch.Tag.pointwise in node.target.tags:
        return POINTWISE, op
    return OPAQUE, op


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    schema = node.target._schema.arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update((argument.name, value) for argument, value in zip(schema, node.args, strict=False))
    found.update(node.kwargs)
    return found


def _varies(arguments: Arguments) -> bool:
    """Whether an argument is a size that varies, so that the attributes would hold for the example alone."""
    found: list[fx.Node] = []
    fx.node.map_arg(tuple(arguments.values()), lambda node: found.append(node) or node)
    return any(isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)) for node in found)


def _rank(value: Any) -> int:
    return value.meta["val"].ndim if isinstance(value.meta["val"], Tensor) else -1


def _is_mean_over_all(arguments: Arguments) -> bool:
    return arguments.get("reduction", 1) != 0 and not arguments.get("dim")


def _each(value: Any, space: int) -> tuple[int, ...]:
    """One number a dim of space, as the operator reads it: a single number stands for all."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(number) for number in (numbers * space if len(numbers) == 1 else numbers))


def _conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    kernel = tuple(int(size) for size in arguments["weight"].meta["val"].shape[2:])
    space = len(kernel)
    dilation = _each(arguments["dilation"], space)
    padding = arguments["padding"]
    if isinstance(padding, str):
        margins = [rate * (size - 1) if padding == "same" else 0 for rate, size in zip(dilation, kernel, strict=True)]
        if any(margin % 2 for margin in margins):
            return None  # one more on one side than on the other
        padding = [margin // 2 for margin in margins]
    return {
        "kernel": kernel,
        "stride": _each(arguments["stride"], space),
        "padding": _each(padding, space),
        "dilation": dilation,
        "groups": int(arguments["groups"]),
    }


def _transposed_conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    space = arguments["weight"].meta["val"].ndim - 2
    return {**(_conv(node, arguments) or {}), "output_padding": _each(arguments["output_padding"], space)}


def _pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    space = int(operation(node).split("pool")[1][0])
    kernel = _each(arguments["kernel_size"], space)
    return {
        "kernel": kernel,
        "stride": _each(arguments.get("stride") or kernel, space),
        "padding": _each(arguments["padding"], space),
        "dilation": _each(arguments.get("dilation", 1), space),
        "ceil_mode": bool(arguments["ceil_mode"]),
    }


def _adaptive_pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    space = int(operation(node).split("pool")[1][0])
    sizes = node.meta["val"].shape[-space:] if _rank(node) > 0 else ()
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return {"output_size": tuple(int(size) for size in sizes)} if sizes else {}


def _batch_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    return {"training": bool(arguments["training"])}


def _layer_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    rank = _rank(node)
    return {"dims": tuple(range(rank - len(arguments["normalized_shape"]), rank))}


def _group_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    return {"dims": tuple(range(1, _rank(node)))}


def _instance_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    return {"dims": tuple(range(2, _rank(node)))} if arguments["running_mean"] is None else None


def _dim(node: fx.Node, arguments: Arguments) -> Attributes | None:
    return {"dim": int(arguments["dim"]) % _rank(node)}


def _nothing(node: fx.Node, arguments: Arguments) -> Attributes | None:
    return {}


def _rnn(node: fx.Node, arguments: Arguments) -> Attributes | None:
    names = ("bidirectional", "batch_first")
    return {name: bool(arguments[name]) for name in names} | {"num_layers": int(arguments["num_layers"])}


_Rule = Callable[[fx.Node, Arguments], Attributes | None]

_RULES: Mapping[str, tuple[str, _Rule]] = {
    **{f"conv{space}d": ("conv", _conv) for space in (1, 2, 3)},
    **{f"conv_transpose{space}d": ("transposed_conv", _transposed_conv) for space in (1, 2, 3)},
    **{f"{what}_pool{space}d": ("pool", _pool) for what in ("max", "avg") for space in (1, 2, 3)},
    **{
        f"adaptive_{what}_pool{space}d": ("adaptive_pool", _adaptive_pool)
        for what in ("max", "avg")
        for space in (1, 2, 3)
    },
    "batch_norm": ("batch_norm", _batch_norm),
    "layer_norm": ("layer_norm", _layer_norm),
    "rms_norm": ("layer_norm", _layer_norm),
    "group_norm": ("layer_norm", _group_norm),
    "instance_norm": ("layer_norm", _instance_norm),
    "cat": ("concat", _dim),
    "concat": ("concat", _dim),
    "concatenate": ("concat", _dim),
    "stack": ("concat", _dim),
    "softmax": ("softmax", _dim),
    "log_softmax": ("softmax", _dim),
    "linear": ("linear", _nothing),
    "scaled_dot_product_attention": ("attention", _nothing),
    "embedding": ("embedding", _nothing),
    "lstm": ("lstm", _rnn),
    "gru": ("lstm", _rnn),
    "rnn_tanh": ("lstm", _rnn),
    "rnn_relu": ("lstm", _rnn),
}
"""Kind and rule by the operator's name; a rule that gives None finds the operator in a form its kind does not cover."""
