"""Which kind of layer an operator is, and what its kind needs to know: from ``aten`` to ``planner.layers``.

:class:`Rules` hold what a user knows about operators of his own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cuda_ops._torch import OpOverload, schema_of
from planner.ir.errors import UnknownNameError
from planner.layers import kind as layer_kind
from profiler.capture import attributes
from profiler.capture.attributes import Arguments, Attributes, Rule, rank_of
from profiler.capture.operators import LOSSES, POINTWISE, REDUCTIONS, RESHAPES, nodes_in, operation, overload_of

OPAQUE = "opaque"
ELEMENTWISE = "pointwise"
LOSS = "loss"
RESHAPE = "reshape"


@dataclass(frozen=True, slots=True)
class Rules:
    """What kind operators are that halopipe does not know, or knows otherwise, by name: ``mylib::op``.

    Attributes:
        elementwise: operators that treat every element by itself; their tensors are broadcast to the result.
        kinds: for others the kind and what finds its attributes (see ``profiler.capture.attributes``).

    Raises:
        UnknownNameError: there is no such kind, or a name is not that of an operator.
    """

    elementwise: frozenset[str] = frozenset()
    kinds: Mapping[str, tuple[str, Rule]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.elementwise, *self.kinds):
            if "::" not in name:
                raise UnknownNameError(f"{name!r} is no operator", ["a name is namespace::operator: mylib::scale"])
        for kind, _ in self.kinds.values():
            layer_kind(kind)

    def of(self, node: fx.Node) -> tuple[str, Rule] | None:
        """What they say about the operator that ``node`` calls."""
        name = schema_of(overload_of(node)).name
        return (ELEMENTWISE, attributes.nothing) if name in self.elementwise else self.kinds.get(name)


NO_RULES = Rules()


def kind_of(node: fx.Node, rules: Rules = NO_RULES) -> tuple[str, Attributes]:
    """The kind of the operator that ``node`` calls, and its attributes (``op`` among them)."""
    op: Attributes = {"op": str(node.target)}
    if not isinstance(node.target, OpOverload):
        return OPAQUE, op
    arguments = arguments_of(node)
    kind, rule = rules.of(node) or _known(node, arguments)
    found = None if kind not in _OF_ANY_SIZE and _varies(arguments) else rule(node, arguments)
    return (OPAQUE, op) if found is None else (kind, {**found, **op})


def _known(node: fx.Node, arguments: Arguments) -> tuple[str, Rule]:
    name = operation(node)
    if name in _POOLS_OF_ALL_SPACE and attributes.is_pool_of_all_space(node, arguments):
        return "global_pool", attributes.nothing
    if name in _RULES:
        return _RULES[name]
    if name in LOSSES and rank_of(node) == 0 and _is_mean_over_all(arguments):
        return LOSS, attributes.loss
    if name in REDUCTIONS and attributes.reduction(node, arguments) is not None:
        return "reduce", attributes.reduction
    if name in RESHAPES:
        return RESHAPE, attributes.reshape
    if name in POINTWISE or torch.Tag.pointwise in overload_of(node).tags:
        return ELEMENTWISE, attributes.nothing
    return OPAQUE, attributes.nothing


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    schema = schema_of(overload_of(node)).arguments
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update((argument.name, value) for argument, value in zip(schema, node.args, strict=False))
    found.update(node.kwargs)
    return found


def _varies(arguments: Arguments) -> bool:
    """Whether an argument is a size that varies, so that the attributes would hold for the example alone."""
    return any(
        isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))
        or (node.op == "placeholder" and node.meta.get("val") is None)  # the number of samples, for one
        for node in nodes_in(tuple(arguments.values()))
    )


def _is_mean_over_all(arguments: Arguments) -> bool:
    return arguments.get("reduction", 1) != 0 and not arguments.get("dim")


_OF_ANY_SIZE = frozenset({ELEMENTWISE, LOSS, RESHAPE, "slice", "upsample", "segment_expand"})
"""Kinds whose attributes hold for every size that an operator may be given."""

_POOLS_OF_ALL_SPACE = frozenset(["mean", *(f"adaptive_avg_pool{space}d" for space in (1, 2, 3))])

_RULES: Mapping[str, tuple[str, Rule]] = {
    **{f"conv{space}d": ("conv", attributes.conv) for space in (1, 2, 3)},
    **{f"conv_transpose{space}d": ("transposed_conv", attributes.transposed_conv) for space in (1, 2, 3)},
    **{f"{what}_pool{space}d": ("pool", attributes.pool) for what in ("max", "avg") for space in (1, 2, 3)},
    **{
        f"adaptive_{what}_pool{space}d": ("adaptive_pool", attributes.adaptive_pool)
        for what in ("max", "avg")
        for space in (1, 2, 3)
    },
    **dict.fromkeys(("pad", "constant_pad_nd"), ("pad", attributes.pad)),
    **{f"{how}_pad{space}d": ("pad", attributes.pad) for how in ("reflection", "replication") for space in (1, 2, 3)},
    **dict.fromkeys(("slice", "narrow", "select"), ("slice", attributes.part)),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), ("slice", attributes.parts)),
    **{
        f"upsample_{how}d": ("upsample", attributes.upsample)
        for how in (
            *(f"{nearest}{space}" for nearest in ("nearest", "nearest_exact") for space in (1, 2, 3)),
            *("linear1", "bilinear2", "trilinear3", "bicubic2"),
        )
    },
    "batch_norm": ("batch_norm", attributes.batch_norm),
    "layer_norm": ("layer_norm", attributes.layer_norm),
    "rms_norm": ("layer_norm", attributes.layer_norm),
    "group_norm": ("layer_norm", attributes.group_norm),
    "instance_norm": ("layer_norm", attributes.instance_norm),
    "cat": ("concat", attributes.dim),
    "concat": ("concat", attributes.dim),
    "concatenate": ("concat", attributes.dim),
    "stack": ("concat", attributes.dim),
    "softmax": ("softmax", attributes.dim),
    "log_softmax": ("softmax", attributes.dim),
    "linear": ("linear", attributes.nothing),
    "sparse_conv": ("sparse_conv", attributes.nothing),
    "sparse_sum_pool": ("sparse_pool", attributes.nothing),
    "sparse_max_pool": ("sparse_pool", attributes.nothing),
    "segment_sum": ("segment", attributes.nothing),
    "segment_max": ("segment", attributes.nothing),
    "segment_expand": ("segment_expand", attributes.nothing),
    "scaled_dot_product_attention": ("attention", attributes.nothing),
    "embedding": ("embedding", attributes.embedding),
    "lstm": ("lstm", attributes.recurrence),
    "gru": ("lstm", attributes.recurrence),
    "rnn_tanh": ("lstm", attributes.recurrence),
    "rnn_relu": ("lstm", attributes.recurrence),
}
"""Kind and rule by the operator's name; a rule that gives None finds the operator in a form its kind does not cover."""
