"""What papers, peers and particular machines brought: a folder each, which the runtime does without.

As in :mod:`planner.extras`: an extra states in ``HOOKS`` what it adds, and the core never imports it.

Modules:

    tiles    Layers of a divided stage in blocks, tile by tile
"""
