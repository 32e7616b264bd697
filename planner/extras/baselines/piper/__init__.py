"""Piper (Tarnawski, Narayanan and Phanishayee, NeurIPS 2021).

Pipeline, data and tensor parallelism with recomputation.

    minimise     max over stages of time per micro-batch                                    ``stages``
    over         a chain of ideals, d replicas of t devices, an option for each layer       ``planner.search``
    subject to   sum of d t <= devices; memory with what is in flight after a stage         ``planner.Sweep``

Besides:

    format   Piper's JSON instances: layers with options (tensor degree, recomputation), and the bytes on their edges
    solver   Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): stages, data degrees and recomputation, within
             memory
"""
