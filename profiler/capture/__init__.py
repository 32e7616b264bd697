"""A module and its loss as one clean graph of layers, checked against the module itself.

Modules:

    by_sample             Operators that number the samples of a batch, by others that do not
    first_calls           What a module keeps from its first call, so that later ones compute something else: no graph
                          holds that
    functional            In-place operators and views become functional ones, so that every value has one maker and may
                          be kept or sent
    graph                 A model as the planner's graph and as an executable one, node by layer
    kept_checks           What the check of a capture found, kept for this user: the same graph of the same code need
                          not be checked again
    kinds                 Which kind of layer an operator of ``aten`` is, and its attributes
    layers                Which operators make up a layer, and what the dims of a value mean
    loss_reduction        Where a graph goes from samples to numbers, and how the parts of a batch make up the number of
                          the whole of it
    marks                 What plans have to know of layers beside their kinds, as attributes: of samples that mix, of
                          state
    operators             Names of operators of one kind each; names of layers, by the user's modules
    refusals              What ``torch.export`` could not take of a model: the line of the user's code, and what to
                          write there instead
    rows                  How many rows of each tensor of a batch belong to a sample, where that is more than one
    sample_independence   Which layers of a captured graph keep samples apart: what lets a batch be cut
    sizes                 Sizes that vary: what the symbols in exported shapes stand for, and which sizes turn out to be
                          fixed
    trace                 From a module and its loss to one clean operator graph, by ``torch.export``
    user_module           The user's module as it was, whatever a capture made of it; its autograd functions,
                          checkpoints, hooks
    user_state            What a user's module and loss keep in Python from call to call: attributes, containers,
                          closures; put back, compared
    verify_capture        Check of a captured graph: it computes the module's loss and gradients, and values have the
                          dtypes that it says
"""
