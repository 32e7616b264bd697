"""Operators of dense networks: kernels, halves of a backward, evaluation mode, recurrent ones.

Modules:

    backward_halves      The two halves of the backward of operators with weights, each by the kernels that torch's own
                         backward calls
    connectionist        The connectionist temporal classification loss (CTC; Graves et al. 2006), as one operator of a
                         loss for each sample
    conv_kernels         The kernel that runs one term of a convolution, forward and backward
    data_dependent       Operators whose shapes follow from data, as one: which tokens an expert takes, and what is made
                         of them
    deferred_gradients   Backward in two halves at the price of one: weight gradients are left for later, where the
                         operator runs
    derivatives          ``torch.autograd.grad`` inside of forward, as one operator: physics-informed losses, forces,
                         penalties on gradients
    evaluation           Evaluation mode of a graph that was captured in training mode, operator by operator
    operators            Operators of our own, ``torch.ops.halopipe``, written in Python: each is one node of a captured
                         graph
    packed               Recurrent layers over packed sequences, as one operator over padded ones and their lengths
    recurrent            Recurrent operators (LSTM, GRU, Elman): their shapes without a walk over time, and mixed
                         precision on any processor
    running_statistics   Running statistics that are the mean over all batches so far: batch norms with
                         ``momentum=None``
    state_writes         Which nodes of a graph share memory with a parameter or buffer, which of them write it, and
                         what of
    user_functions       A user's ``torch.autograd.Function`` as one operator, so that a captured graph keeps its
                         backward
    value_checks         Branches on values that a step is not to take: the graph is captured without them, and looks at
                         the values itself
"""

from __future__ import annotations

__all__: list[str] = []
