"""Graph networks on sampled neighbours: each rank samples those of its own seeds (decision 0014).

Modules:

    preparing   A batch of seeds as the inputs of a graph network: sampled in a thread of its own, piece by piece, ahead
                of its step
"""

from __future__ import annotations

_OF = "cuda_ops.extras.sampling.preparation.SampledPreparation"
HOOKS = {"batch preparation": {_OF: "runtime.extras.sampled_graphs.preparing:SampledPreparing"}}
