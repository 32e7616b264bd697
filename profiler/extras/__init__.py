"""What particular machines brought to the profiler: a folder each, which it does without.

Modules:

    modelled   Profiles of networks and devices that are not here: shapes of fake tensors, times of kernel models
"""
