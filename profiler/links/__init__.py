"""What messages and sums between ranks cost, on this host and between hosts.

Modules:

    calls        What a rank computes around an exchange, beside its message: without a peer, as what comes is there at
                 once
    cpu          What messages and sums cost between workers on CPU cores, over the transport of a run
    gpu          What messages and sums cost between the GPUs of this host, over NCCL, as the runtime sends them
    host_pairs   Pairs of ranks, one after another; by how much a message delays computation
    kept         What was measured of this machine, kept for this user: links, sums and exchanges within the host
    messages     What messages between two ranks cost, each way (latency, bandwidth of a long stream), measured by both
                 of them together
    processes    Processes that measure the links of this host: the side that starts them and waits, which loads no
                 torch
"""
