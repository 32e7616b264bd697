"""How a layer may be run on a group of ranks, and what a rank's part of it reads."""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.layout import Layout
from planner.ir.plan import Placement


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How a layer may be run on a group.

    Attributes:
        cuts: cut points by dim (``Layout.cuts``), in the order of the grid of ranks.
        margin: rows by which each rank works beyond its own part along the cut dims of space, so that the next layers
            need no halo (one wide exchange for several layers; the overlap is computed twice).
        recompute: whether what it saves is dropped after the forward and computed again before the backward.
        ways: ranks that share the input channels of a contraction (:mod:`planner.layers.contraction`); 0: as many as is
            cheapest.
    """

    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    margin: int = 0
    recompute: bool = False
    ways: int = 0

    @classmethod
    def of(cls, layout: Layout, margin: int = 0) -> ShardingSpec:
        """The option that is ``layout``."""
        return cls(tuple((dim, tuple(points)) for dim, points in layout.cuts.items()), margin)

    @classmethod
    def placed(cls, placement: Placement, recompute: bool = False) -> ShardingSpec:
        """The option that a plan writes down, its stage recomputing or not."""
        cuts = tuple((dim, tuple(points)) for dim, points in placement.cuts.items())
        return cls(cuts, placement.margin, recompute, placement.ways)

    def placement(self, stage: int) -> Placement:
        """What a plan writes down."""
        return Placement(stage, dict(self.cuts), max(1, self.ways), self.margin)

    @property
    def layout(self) -> Layout:
        """The cut points as a layout."""
        return Layout(dict(self.cuts))

    @property
    def grid(self) -> tuple[tuple[str, int], ...]:
        """Parts by dim."""
        return tuple((dim, len(points) - 1) for dim, points in self.cuts)

    def __str__(self) -> str:
        parts = " x ".join(f"{dim}:{parts}" for dim, parts in self.grid) or "whole"
        shared = f" channels shared by {self.ways}" if self.ways > 1 else ""
        margin = f" margin {self.margin}" if self.margin else ""
        return parts + shared + margin + (" recomputed" if self.recompute else "")
