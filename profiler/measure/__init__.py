"""What each layer takes: seconds, bytes and optimiser steps, in fresh and quiet processes.

Modules:

    back_ends         The back ends that torch chooses for convolutions: costs are interpolated inside one only
    beside_layers     What a step costs beside forward and backward: gradients added up, the optimiser, the wait before
                      an action
    child_process     A function in a fresh process of its own: pinned, alone with its allocator, and gone when the
                      parent goes
    contention        How far repeated measurements can be trusted: their mean and spread, and how quiet the machine was
    deduplicated      Layers that do the same work on the same shapes: of the twelve blocks of a GPT two are timed, the
                      first and the last
    devices           The kinds of devices that can be profiled: one record a torch backend
    host_time         What the host adds to a step on a GPU, shared over the layers, so that layers add up to a step
    job               What a measuring process is asked for
    memory            What each layer keeps between forward and backward (activations), and how high memory rises while
                      it runs
    noise             Clocks: how long a stretch of work took, on the processor or on a GPU; and a fixed kernel
    partial_results   What one measuring process found, piece by piece; the file of an interrupted profile
    preparing         What a host makes ahead of a micro-batch: of clouds site sets, maps and ranks' shares of them, of
                      seeds neighbours
    processes         The measuring processes: fresh ones, one after another on one core; what met a busy machine is
                      measured once more
    progress          How far a profile is, and what is left of it, in seconds: by what was measured so far, not by
                      counts
    sizes             At which micro-batch sizes layers are measured; where they change their back end
    slowdowns         What layers lose while other devices of their host compute, from passes by turns, alone and
                      together
    timing            What each layer takes: forward, backward, and its halves; how many passes are timed
    together          Passes by turns, alone and while the other devices of a host compute, too
    worker            What runs in a measuring process: the model is built, captured, and every layer measured at the
                      sizes that matter
"""
