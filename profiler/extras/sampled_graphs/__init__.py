"""Graph networks on sampled neighbours: seeds are their samples (decision 0014).

Modules:

    networks   GraphSAGE and GAT in plain torch, for users ``profiler.models.graphs``
    source     A factory's SampledGraph as a model on tensors, whose blocks are inputs; what sampling them costs
"""

from __future__ import annotations

_HERE = "profiler.extras.sampled_graphs"
_SAMPLING = "cuda_ops.extras.sampling"
HOOKS = {
    "inputs": {f"{_SAMPLING}.sampler.SampledGraph": f"{_HERE}.source:load_sampled"},
    "raw inputs": {f"{_SAMPLING}.sampler.SampledGraph": f"{_HERE}.source:raw_of"},
    "preparation costs": {f"{_SAMPLING}.preparation.SampledPreparation": f"{_HERE}.source:sampling_cost"},
    "profiler.models.graphs": {"*": f"{_HERE}.networks"},
}
