"""Stages under torch.compile, divided ones included: their collectives are such as the compiler sees (decision 0013).

Modules:

    collective   What a divided stage moves, as functional collectives: torch.compile sees them in its graph
    compiled     Stages that torch.compile makes faster, divided ones included
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from runtime.rank import Compiler, RankContext
    from runtime.stage.builder import StageCompiler


class Compiling(RuntimeExtra):
    """Stages under torch.compile."""

    def stage_compiler(self, context: RankContext, compiler: Compiler) -> StageCompiler:
        from runtime.extras.compiling.compiled import CompiledStages

        return CompiledStages(context, compiler)


EXTRA = Compiling()
