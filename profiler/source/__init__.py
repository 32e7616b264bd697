"""From a MODEL string to a module with example inputs and a loss.

Modules:

    clouds         Sparse networks: a factory's SparseTensor as a model on tensors, whose maps are inputs
    copies         A model copied with what its functions hold
    local_losses   A model as blocks of which each is trained by a loss of its own: no gradient passes from one to the
                   next
    losses         The loss that is trained: the user's own, summed where there are several, or what the module computes
                   itself
    model          A model with its example and its loss, as a factory describes it; sizes that vary
    module_kinds   Modules that nothing can train, or not as they are: refused by what they are, before they are run
    parts          What a factory returned, or a person gave, as a model that is ready to train
    saved          A module object as a file (cloudpickle, SHA-256), so that other processes train that very module: its
                   weights, its code, its example
    source         From a MODEL string to a module with example inputs and a loss
    structure      A batch as its user has it, and the tuple of tensors that a step is fed: the one place that makes one
                   of the other
"""
