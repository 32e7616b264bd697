"""Token slices (:mod:`planner.extras.token_slices`) on a rank.

Modules:

    peers    Token slices of one stage on one rank: what a slice reads of those before it is kept here until their
             backward
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.extras.token_slices.axes import TokenAxes
    from planner.layers.boundary import OrderedAxis
    from runtime.pipeline.routing import Piece
    from runtime.spatial import PeerGroup


class SlicedMicroBatches(RuntimeExtra):
    """Micro-batches in slices."""

    def parts_as_peers(self, num_parts: int) -> PeerGroup:
        from runtime.extras.token_slices.peers import SlicePeers

        return SlicePeers(num_parts)

    def joined_parts(
        self, axis: OrderedAxis, outputs: Mapping[int, Mapping[str, Piece]], rows: Sequence[int], num_parts: int
    ) -> Mapping[int, Mapping[str, Piece]]:
        from runtime.extras.token_slices.peers import of_micro_batches

        return of_micro_batches(cast("TokenAxes", axis), outputs, rows, num_parts)


EXTRA = SlicedMicroBatches()
