"""Op rules: how a layer kind's operator runs on this rank's part, one function a kind, in a module for each family.

The rule of a kind is the function ``run_<kind>`` in the module that is called like the kind's family in
``planner.layers``; it is loaded once a plan has a kind of the family.  A rule has

    run_<kind>(shard, op, arguments) -> result

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

from planner.layers import kind
from runtime.spatial.op_rules.generic import OpRule, run_on_reads

__all__ = ["OpRule", "form"]

_FAMILIES = ("convolution", "data_movement", "elementwise", "normalization", "products")


@functools.cache
def form(name: str) -> OpRule:
    """The rule for layers of the kind of that name."""
    family = kind(name).__module__.rpartition(".")[2]
    if family not in _FAMILIES:
        return run_on_reads
    rule: OpRule = getattr(importlib.import_module(f"{__name__}.{family}"), f"run_{name}", run_on_reads)
    return rule
