"""Counts the memory of torch's tensors on the CPU, exactly, and holds it below a limit.

torch has no such count on the CPU.  `install` puts an allocator of ours in front of its own, for the rest of the
process: it adds up bytes in use, keeps their peak, and refuses what goes beyond a limit with `torch.OutOfMemoryError`,
which can be caught.  It takes a fraction of a microsecond an allocation.  Tensors made before are not counted, neither
when they go.  What libraries take without asking torch is not seen: convolutions of oneDNN have their scratch memory
from torch's allocator (counted), products of matrices of MKL and oneDNN from malloc (not counted, and little).

    with counting() as counter:
        loss = model(x)
    print(counter.peak_bytes)

Modules:

    counter   The counting allocator, compiled at first use and put in front of torch's own; and meters of any device
"""

from __future__ import annotations

from cuda_ops.memory.counter import MemoryCounter, MemoryMeter, available, counting, install, meter_of

__all__ = ["MemoryCounter", "MemoryMeter", "available", "counting", "install", "meter_of"]
