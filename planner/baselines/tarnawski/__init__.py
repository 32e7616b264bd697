"""Tarnawski et al. (NeurIPS 2020): contiguous sets of operators on accelerators, the smallest largest load.

Modules:

    format     The JSON instances of dnn-partitioning: operators or layers with latencies on two kinds of device, and
               their edges
    max_load   Loads of stages whose device computes, sends and receives in turn: the cost model of Tarnawski et al.
               (2020)
    planner    The planner of Tarnawski et al. for throughput: contiguous sets of operators on accelerators and CPUs
    solver     Tarnawski et al. (NeurIPS 2020): one device a stage, the smallest largest load, contiguous sets of layers
"""

from __future__ import annotations

__all__: list[str] = []
