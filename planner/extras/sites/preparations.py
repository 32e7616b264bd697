"""What hosts find and make of coordinates, before the program and in it.

before the program   every rank finds the sites of all micro-batches, at all levels; where ranks of some stage share
them, also puts them in order, by the pairs of all maps, which are made for it
PREP of a stage      the maps and segments that its layers read; of maps in that order its own part
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.costs.stages.input_pipeline import Preparations, input_bytes
from planner.extras.sites.exchanges import halo_rows, halos_by_layer
from planner.ir.graph import SITES, is_sites
from planner.ir.profile import PreparationCost

_COORDINATES_BYTES = 3 * 4  # int32 (cuda_ops.sparse.preparation)
_KEY_BYTES = _ROW_BYTES = 8  # int64
_ORDER_BYTES = 4 * 8 + 2 * 8 + 4 + 2 + 4
"""runtime.sparse: coordinates with samples, order and place int64, rows int32, owner int16, number int32"""


class SitePreparations(Preparations):
    """Look-ups of one profile, each made once."""

    def in_program_s(self, cost: PreparationCost, shared: bool) -> float:
        """All but sites; where all maps are there, what is made of one for a rank."""
        if self._is_found(cost):
            return 0.0
        return cost.shared_s if shared and self._is_map(cost) else cost.seconds

    def before_s(self, cost: PreparationCost, shared: bool) -> float:
        """Sites, and where ranks share them their order and all maps."""
        if self._is_found(cost):
            return cost.seconds + shared * cost.shared_s
        return cost.seconds if shared and self._is_map(cost) else 0.0

    def num_bytes(self, layers: Iterable[int], samples: float, parts: int = 1) -> int:
        """Bytes of what is made of a micro-batch for layers, which read ``samples`` samples of it.

        Features are copied in the order of the sites.  Of a map whose sites several ranks share, each has its part, and
        apart what joins its own sites where it borrows others.

        Args:
            parts: ranks that share out the sites.
        """
        if not self.inputs:
            return 0
        graph = self.profile.graph
        layers = tuple(layers)
        read = {name for index in layers for name in graph.layers[index].inputs if name in graph.inputs}
        copied = sum(input_bytes(graph, name, samples) for name in read - self.inputs if graph.inputs[name].has_sites)
        twice = 2 if parts > 1 and not self.look_ahead and self._borrows(parts, samples * parts) else 1
        return copied + twice * super().num_bytes(layers, samples)

    def before_program_bytes(self, samples: float, *, shared: bool) -> int:
        """Of sites: the user's coordinates; of each its key, of the input's its row in the user's tensors too.

        Args:
            shared: whether some stage's ranks share out the sites: then also their order, and all maps.
        """
        if not self.inputs:
            return 0
        graph = self.profile.graph
        counts = dict[str, int]()
        for spec in graph.inputs.values():
            counts.update((dim, extent) for dim, extent in zip(spec.dims, spec.shape, strict=True) if is_sites(dim))
        each = _KEY_BYTES + (_ORDER_BYTES if shared else 0)
        total = each * sum(counts.values()) + (_COORDINATES_BYTES + _ROW_BYTES) * counts.get(SITES, 0)
        maps = sum(graph.inputs[name].num_bytes for name in self.inputs) if shared else 0
        return round((total + maps) * samples / graph.samples)

    def _is_found(self, cost: PreparationCost) -> bool:
        """Whether it is a site set, or made of the user's tensors alone."""
        return not cost.inputs or (not cost.after and not self._is_map(cost))

    def _is_map(self, cost: PreparationCost) -> bool:
        """Whether what it makes lies along sites."""
        return any(self.profile.graph.inputs[name].has_sites for name in cost.inputs)

    def _borrows(self, parts: int, samples: float) -> bool:
        """Whether ranks read sites of each other; they do not where each gets whole samples."""
        measured = halos_by_layer(self.profile).values()
        whole = max(1, round(samples))
        return not measured or any(halo_rows(halos, self.profile.graph, 0, parts, whole) >= 1 for halos in measured)
