"""Profiles of networks and devices that are not here: shapes of fake tensors, times of kernel models.

``networks`` makes a network without memory and captures it, ``dependence`` says which of its layers keep samples apart,
``operators`` prices what torch's dispatcher is asked for, ``watch`` is the clock and the memory meter that
:mod:`profiler.measure` runs with, and ``session`` writes the profile.
"""
