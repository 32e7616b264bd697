"""Stages whose layers are divided along any dims: what moves between ranks inside a stage, and each rank's part.

Names are imported when they are first used: a rank whose plan divides no layer loads nothing of this.

Modules:

    collectives   Sums over the ranks of a step's group, of small tensors: every rank sends its own to every other
    contraction   Input channels shared by several ranks: partial sums are made, sent to who keeps them, and added
    convolution   A convolution over cut space: which terms it is a sum of, and three ways to compute it
    decompose     Runs the layers of a stage divided: puts a local form in place of the operator of each layer; who
                  draws what
    deferred      Work of a backward that nothing waits for, such as a weight's gradient: done while a message is on its
                  way
    empties       Results that hang on what a layer reads, so that backward takes the same way on every rank
    exchange      Forward halos and resharding inside a stage: every rank has a box of a tensor, and gets the box that
                  its next layer reads
    layer_shard   One layer of a divided stage: this rank's part, how it gets what it reads, who combines statistics
    node_call     How one node of a captured graph is called on a part, and what of it depends on sizes
    op_rules      Op rules: how a layer kind's operator runs on this rank's part, one function a kind, in a module for
                  each family
    parameters    A rank's part of each parameter and buffer of a divided stage, and the ranks that share its gradient
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from runtime.spatial.decompose import DividedStage, DrawnPlaces
    from runtime.spatial.deferred import DeferredGradients
    from runtime.spatial.empties import connected
    from runtime.spatial.exchange import PeerGroup
    from runtime.spatial.layer_shard import groups_in
    from runtime.spatial.parameters import ParameterPart, ParameterParts, groups_of_parameters, parts_of, sliced

__all__ = [
    "DeferredGradients",
    "DividedStage",
    "DrawnPlaces",
    "ParameterPart",
    "ParameterParts",
    "PeerGroup",
    "connected",
    "groups_in",
    "groups_of_parameters",
    "parts_of",
    "sliced",
]

_HOMES = {
    "DeferredGradients": "deferred",
    "DividedStage": "decompose",
    "DrawnPlaces": "decompose",
    "ParameterPart": "parameters",
    "ParameterParts": "parameters",
    "PeerGroup": "exchange",
    "connected": "empties",
    "groups_in": "layer_shard",
    "groups_of_parameters": "parameters",
    "parts_of": "parameters",
    "sliced": "parameters",
}

__getattr__ = lazily(__name__, _HOMES)
