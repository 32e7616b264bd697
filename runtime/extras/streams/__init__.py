"""Batches without an end, of which each stage has its own at the same time (PARTIME, Meloni et al. 2022).

Modules:

    stream   Batches without an end, of which each stage has its own at the same time: a pipeline over time
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.extras.streams.stream import Setting
    from runtime.rank import RankContext
    from runtime.stage.local_stage import LocalStage


class Streams(RuntimeExtra):
    """Batches without an end."""

    def stream(self, context: RankContext, local_stages: Mapping[int, LocalStage]) -> Setting:
        from runtime.extras.streams.stream import setting_of

        return setting_of(context, local_stages)


EXTRA = Streams()
