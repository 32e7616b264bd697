"""What papers, peers and particular machines brought: a folder each, which the planner does without.

An extra imports the core; the core never imports an extra.  What an extra adds to the core it states in ``HOOKS`` of
its own ``__init__``, by the point that the core asks at (:mod:`planner.ir.extras`): no file of the core names it, and
without its folder the core plans as before.

Modules:

    baselines       The planners of other papers
    catalogue       Devices and links one does not have at hand: one YAML file a device, every figure with its source
                    and date
    export          Plans, profiles and timelines in the forms of other tools: tables (pandas), launchers
    kernels         Kernels and links of GPUs that are not here, from tables that others measured
    on_chip_memory  Devices with a second memory, beside the multipliers (block RAM of an FPGA)
    sites           Sites of point clouds, which the ranks of a stage share out as each batch has them: what that costs
    tiles           Fused tiles: blocks of layers that each rank of a forward plan runs through without exchanges
    token_slices    Token slices: sequences cut along time into parts that go through a stage one after the other
    transformers    A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is
                    the best
"""
