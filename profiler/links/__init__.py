"""What messages and sums between ranks cost, on this host and between hosts.

Modules:

    calls        What a rank computes around an exchange, beside its message: without a peer, as what comes is there at
                 once
    cpu          What messages and sums cost between workers, over the transport of a run, pinned as a run pins them
    gpu          What messages and sums cost between the GPUs of this host, over NCCL, as the runtime sends them
    host_pairs   Pairs of ranks, one after another: each measured by its two, while the others wait; everybody hears
                 what was found
    messages     What messages between two ranks cost, each way, measured by both of them together
"""

from __future__ import annotations

__all__: list[str] = []
