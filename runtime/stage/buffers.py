"""Buffers that layers write: where two ranks would write them differently, a plan cannot be run.

Parameters may be shared, as gradients are summed; what a layer writes itself is not.  So such a buffer must be on one
stage.  On a stage of several ranks what is written must not depend on a rank's own rows, as a count of batches does
not, and as the statistics of batch normalisation do not that are taken over all of them.
"""

from __future__ import annotations

import torch
from torch import fx

from cuda_ops.dense.user_functions import LINEAR_BACKWARD, function_of
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE
from planner.ir.plan import Decision
from runtime.stage.captured import CapturedModel
from runtime.stage.cut import attributes_behind, written


def refuse_drifting_buffers(model: CapturedModel, decision: Decision) -> None:
    """Raises :class:`UnsupportedModelError` where copies of a buffer would drift apart."""
    dependent, behind = _dependent(model.graph_module.graph), attributes_behind(model.graph_module.graph)
    writers: dict[str, tuple[int, str]] = {}
    users = stages_using(model, decision)
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None:
            continue
        stage = decision.layers[layer].stage
        for name in sorted(written(node, behind)):
            writers[name] = stage, layer
            is_summed = node.target is torch.ops.aten.batch_norm.default
            if len(decision.stages[stage].ranks) > 1 and node in dependent and not is_summed:
                raise UnsupportedModelError(
                    f"layer {layer} writes the buffer {name} from the rows it sees",
                    [f"stage {stage} runs it on {len(decision.stages[stage].ranks)} ranks, each with other rows"],
                    ["put that layer on a stage of one rank"],
                )
    for name, (stage, layer) in writers.items():
        if others := sorted(users[name] - {stage}):
            raise UnsupportedModelError(
                f"the buffer {name} is written by layer {layer} on stage {stage} and used by stage {others[0]}",
                ["a buffer that layers write must be on one stage"],
                ["put all layers that use it on one stage"],
            )


def refuse_partial_gradients(stage: int, model: CapturedModel, decision: Decision) -> None:
    """Raises :class:`UnsupportedModelError` where a rank would have a share of the gradient that a Function needs.

    Ranks that hold the same of a value get the gradients of those parts of it that are read of each, and add up theirs;
    that is right for a backward that is linear.
    """
    ranks = len(decision.stages[stage].ranks)
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None or decision.layers[layer].stage != stage or node.meta.get(LINEAR_BACKWARD, True):
            continue
        if len(decision.layers[layer].cuts.get(SAMPLE, (0, 1))) - 1 < ranks:
            raise UnsupportedModelError(
                f"layer {layer} runs {function_of(node)}, whose gradient ranks would have in shares",
                [f"stage {stage} shares out more than samples, and its backward is not linear"],
                ["plan with --allow sample alone", "write a backward that is linear in the gradient"],
            )


def stages_using(model: CapturedModel, decision: Decision) -> dict[str, set[int]]:
    """By parameter, buffer or constant, the stages whose layers read or write it."""
    behind = attributes_behind(model.graph_module.graph)
    users: dict[str, set[int]] = {}
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name)
        if layer is None:
            continue
        for argument in node.all_input_nodes:
            if argument in behind:
                users.setdefault(behind[argument], set()).add(decision.layers[layer].stage)
    return users


def _dependent(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a micro-batch, be it on its number of rows alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found
