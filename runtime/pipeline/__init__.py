"""The pipeline: one rank's row of the program, its messages, its micro-batches.

Modules:

    executor         Executes one rank's row of a program, action by action; names where an error of a step happened
    loss_weighting   Loss weights of a rank's parts of one batch (see ``runtime.stage.sample_weights``)
    microbatches     What a step trains on: micro-batches, of which every rank asks for its parts
    p2p              The mailbox of one rank: pieces of tensors between the stages of a program, over the transport or
                     within the rank
    routing          What one rank sends, receives and keeps for every edge and micro-batch; tensors cut into pieces and
                     joined
    runner           Runs a rank's row of the program on one batch after another
    specialize       A plan bound to the sizes of one batch: its messages, and every stage's share of every micro-batch
"""

from __future__ import annotations

__all__: list[str] = []
