"""Sampled neighbourhoods of a large graph, for graph neural networks: SALIENT's input pipeline (Kaler et al. 2022).

Read ``graph`` (edges and features, on disk), ``draws`` (which neighbours are drawn: plain, and compiled), ``sampler``
(blocks of layers), ``preparation`` (a batch of seeds as a network's inputs).

Besides:

    generated   Graphs that are made, not read: for tests and demonstrations, written once into the cache folder
"""

from __future__ import annotations

__all__: list[str] = []
