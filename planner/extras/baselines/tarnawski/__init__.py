"""Tarnawski et al. (NeurIPS 2020): contiguous sets of operators on accelerators, the smallest largest load.

    minimise     max over devices of  sum of latencies + cost of values that cross its border     ``max_load.Loads``
    over         the device of every node; contiguous: between two ideals                        ``max_load.search``
                 any set of nodes: an integer program                                            ``planner.place``
    subject to   bytes on an accelerator within its memory                                       ``planner.solve``

Besides:

    format   The JSON instances of dnn-partitioning: operators or layers with latencies on two kinds of device, and
             their edges
    solver   Tarnawski et al. (NeurIPS 2020): one device a stage, the smallest largest load, contiguous sets of layers
"""
