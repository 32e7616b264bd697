"""What sits right on the machine: how a process is set up for its device, later the kernels.

The profiler and the runtime set their processes up with the same call, so that a profile describes the run.

Modules:

    _torch          Every private name of torch that this project leans on, each with what for and what the public
                    alternative lacks
    calls           How a node of a captured graph calls its operator: arguments by the names of the schema, what it
                    writes, whether it is random
    dense           Operators of dense networks: kernels, halves of a backward, evaluation mode, recurrent ones
    device          A process as one device: its cores, allocator and seeds, its GPUs, and libraries compiled at first
                    use
    extra           All that extras may add to the operators
    extras          What few networks need: a folder each, which the operators do without
    memory          Counts the memory of torch's tensors on the CPU, exactly, and holds it below a limit
    operator_table  What is known of torch's operators, one row an operator: its kind (elementwise, ...), what it draws,
                    how it treats samples; read by the profiler's capture, modelled profiles and runs
    preparation     A batch that is prepared before the network sees it: clouds become sites and maps, seeds become
                    sampled neighbours
    sparse          Sparse 3-D networks on packed, sorted coordinates: operators in plain torch, C++ and Triton by
                    one call
"""

from __future__ import annotations

from cuda_ops.device.host import (
    DeviceDescription,
    core_of,
    cores_beside,
    device_description,
    die_with_parent,
    prepare_process,
)

__all__ = [
    "DeviceDescription",
    "core_of",
    "cores_beside",
    "device_description",
    "die_with_parent",
    "prepare_process",
]
