"""Piper (Tarnawski, Narayanan and Phanishayee, NeurIPS 2021).

Pipeline, data and tensor parallelism with recomputation.

Modules:

    format    Piper's JSON instances: layers with options (tensor degree, recomputation), and the bytes on their edges
    planner   Piper: pipeline, data and tensor parallelism with recomputation, on like devices
    solver    Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): stages, data degrees and recomputation, within
              memory
    stages    What a stage costs in Piper's model, for all pairs of ideals at once
"""

from __future__ import annotations

__all__: list[str] = []
