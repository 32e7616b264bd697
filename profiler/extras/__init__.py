"""What few models and machines need: a folder each, which the profiler does without.

Modules:

    modelled         Profiles of networks and devices that are not here: shapes of fake tensors, times of kernel models
    sampled_graphs   Graph networks on sampled neighbours: seeds are their samples
"""
