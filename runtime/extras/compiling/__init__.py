"""Stages under torch.compile, divided ones included: their collectives are such as the compiler sees (decision 0013).

Modules:

    collective   What a divided stage moves, as functional collectives: torch.compile sees them in its graph
    compiled     Stages that torch.compile makes faster, divided ones included
"""

from __future__ import annotations

HOOKS = {"stage compilers": {"torch.compile": "runtime.extras.compiling.compiled:CompiledStages"}}
