"""A process as one device: its cores, allocator and seeds, its GPUs, and libraries compiled at first use.

Modules:

    compiling        Compiles C++ sources into a cache folder, where any number of processes find the library
    driver           What a rank asks the driver of its GPU while it computes: to wait, to time, and for generators of
                     random numbers
    fork_server      Processes that begin with torch loaded: forked from a server that has loaded it once
    gpus             The NVIDIA GPUs of this host, as this process sees them: what they are, and at which clocks they
                     run
    host             Sets a process up as one device: an allocator that keeps its pages, its cores, a fixed number of
                     threads
    placing          A captured graph on another device than the one that it was captured on
    seeding          The random numbers that user code draws from the generators that every program shares
    torch_versions   The releases of torch that are tested, and what is raised where one has not what is leant on
"""

from __future__ import annotations

__all__: list[str] = []
