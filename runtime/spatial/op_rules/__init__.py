"""Op rules: how a layer kind's operator runs on this rank's part, one function a kind, in a module for each family.

The list of them is ``_RULES``, by the names of ``planner.layers``; a module is loaded once a plan has a kind of its
family.  A rule has

    rule(shard, op, arguments) -> result

    shard       the layer on this rank (:class:`runtime.spatial.layer_shard.LayerShard`)
    op          ``op(**arguments)`` calls the operator
    arguments   by the names of the operator's schema, defaults filled in.  A tensor that is a value of the graph covers
                what this rank holds of it; parameters and buffers are this rank's part; integers that depend on the
                number of samples are those of the part that this rank does.

and gives what covers ``shard.done``.  It stays connected to its inputs in autograd also where that is empty, since
exchanges must run backward on all ranks, in the same order.  Kinds without a rule of their own read all that they need
and call their operator on it (``generic.run_on_reads``).  By what they ask of a rank:

    the same part of everything         pointwise, reshape, slice, concat, embedding
    a halo, or a window                 conv, transposed_conv, pool, adaptive_pool, upsample, pad
    sums over the ranks                 batch_norm, layer_norm, global_pool, linear, loss
    all along a dim, or nothing divided attention, softmax, lstm, opaque

Modules:

    convolution     Op rules of windows over space: convolutions and pooling
    data_movement   Op rules of layers that move elements: views, slices, concatenation, padding and interpolation
    elementwise     Op rules of layers that treat elements by themselves, and of losses, which then add them up over the
                    ranks
    generic         Op rules for any operator: on what a part reads, or on whole samples
    normalization   Op rules of normalisation: by the statistics of all ranks, or of what lies whole on one of them
    products        Op rules of products with weights or between tensors: linear maps, embeddings, attention
"""

from __future__ import annotations

import functools
import importlib
from typing import cast

from runtime.spatial.op_rules.generic import OpRule

__all__ = ["OpRule", "form"]

_ANY_KIND = "generic.run_on_reads"
_RULES = {
    "adaptive_pool": "convolution.run_adaptive_pool",
    "attention": "products.run_attention",
    "batch_norm": "normalization.run_batch_norm",
    "concat": "data_movement.run_concat",
    "conv": "convolution.run_conv",
    "embedding": "products.run_embedding",
    "global_pool": "convolution.run_global_pool",
    "layer_norm": "normalization.run_layer_norm",
    "linear": "products.run_linear",
    "loss": "elementwise.run_loss",
    "lstm": "generic.run_whole_samples",  # samples are apart; other dims of what it makes are cut as the layout says
    "opaque": "generic.run_whole_samples",
    "pad": "data_movement.run_pad",
    "pointwise": "elementwise.run_pointwise",
    "pool": "convolution.run_pool",
    "reshape": "data_movement.run_reshape",
    "slice": "data_movement.run_slice",
    "softmax": "normalization.run_softmax",
    "transposed_conv": "convolution.run_transposed_conv",
    "upsample": "data_movement.run_upsample",
}


@functools.cache
def form(kind: str) -> OpRule:
    """The rule for layers of ``kind``."""
    family, _, function = _RULES.get(kind, _ANY_KIND).partition(".")
    return cast(OpRule, getattr(importlib.import_module(f"{__name__}.{family}"), function))
