"""What few networks need: a folder each, which the operators do without.

Modules:

    adapters   Tensors, weights and kernels of torchsparse and spconv, imported only when they are used
    sampling   Sampled neighbourhoods of a large graph, for graph neural networks: SALIENT's input pipeline (Kaler et
               al. 2022)
"""

from __future__ import annotations

__all__: list[str] = []
