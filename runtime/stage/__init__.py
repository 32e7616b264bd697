"""Stages of a captured model as functions: cut out, run forward and backward in halves, on versions, with draws.

Modules:

    alone            A rank's stages timed alone: forward and backward of one share of a micro-batch, and nobody is
                     waited for
    batch_norm       Batch normalisation whose statistics are those of the parts of several ranks together
    builder          Builds the stages of a rank, from the captured graph to the update of their weights
    cut              Cutting one stage out of the captured graph: a function of its inputs, its state and the number of
                     samples
    functions        A stage's functions: made for training and evaluation, and called
    index_ranges     Which integers the inputs of a step may hold: classes of a loss, rows of a table
    local_stage      One stage on a rank, as the executor calls it
    modes            How a stage is run, and on what part of a micro-batch
    random           Random numbers that depend on the seed, the step, the micro-batch and the node, whoever draws them
    recomputed       Spans of a stage's layers that are computed again when the backward comes to them
    sample_weights   Loss weights: what the parts of a batch count for, where a loss is not just a mean over samples
    shapes           The shapes of all values for a micro-batch whose inputs have other shapes than those of the capture
    sharded_passes   Where in its passes a stage uses its parameters, and the hooks by which ZeRO-2 and ZeRO-3 follow a
                     pass
    stage            Forward and backward of micro-batches on one rank
    state_dict       What the stages of a rank hold between steps, by the user's own names
    weight_versions  The versions of a stage's weights, in programs that update them within a step
    without_rows     Operators on a rank that has no rows of a micro-batch
"""

from __future__ import annotations

__all__: list[str] = []
