"""What the authors of published planners say their planners take, or let them take.

A planner that is asked for by name may take as long: whoever compares with it is not flattered by a search that was cut
short.  Where nothing is stated the problem's own time limit is the budget, as it is for our search
(:func:`planner.solvers.budget.stated_s`).

    BaPipe      no time is known to us (arXiv 2012.12544); the programme is polynomial
    DAPPLE      no limit is stated with the released planner, which took 0.07 to 1.84 s on eight of its own instances
    Dryden      no limit is known to us (IPDPS 2019); shortest paths are polynomial
    Piper       the released programme (msr-fiddle/piper, ``algo.cpp``) has no limit: it runs to its end
    SparsePipe  the released programme has no limit; it is PipeDream's
"""

from __future__ import annotations

PIPEDREAM_S = 8.0
"""Narayanan et al., SOSP 2019, section 5.5: under 8 seconds for all models and deployments evaluated."""

TARNAWSKI_S = 1200.0
"""Tarnawski et al., NeurIPS 2020: ``TimeLimit`` of ``throughput-ip/ip.py`` in msr-fiddle/dnn-partitioning."""

STATED_S = {"pipedream": PIPEDREAM_S, "pipedream-hierarchical": PIPEDREAM_S, "tarnawski": TARNAWSKI_S}
"""By the name of the solver."""
