"""All that extras may add to the planner (:mod:`planner.ir.extras` says how)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

from planner.ir.extras import Extra, ImportPaths

if TYPE_CHECKING:  # of every floor, for type checkers alone
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from planner.costs.candidate import Candidate
    from planner.costs.cost_model import CostModel
    from planner.costs.layers.cost_table import Array
    from planner.costs.layers.roofline import LayerWork
    from planner.costs.shards.sharding_spec import ShardingSpec
    from planner.costs.stages.action_costs import StageCosts
    from planner.costs.stages.input_pipeline import Preparations
    from planner.costs.stages.layouts import LayoutPrices
    from planner.costs.stages.stage_cost import StageCost
    from planner.ir.cluster import Cluster, DeviceSpec
    from planner.ir.graph import Graph
    from planner.ir.plan import Block, Decision, Size
    from planner.ir.problem import Problem
    from planner.ir.profile import Profile
    from planner.ir.schedule import Pipeline, Schedule
    from planner.layers.boundary import OrderedAxis
    from planner.layers.division import Division
    from planner.layers.sized import SizedLayer
    from planner.schedules import Order
    from planner.solvers.best_first.continued import ContinuedSearch
    from planner.solvers.candidates.constraints import Constraints
    from planner.solvers.requests import Refusal


class DescribedMachines(Protocol):
    """What a cluster file describes."""

    @property
    def cluster(self) -> Cluster:
        """The machines."""

    @property
    def measured_on(self) -> Mapping[str, DeviceSpec]:
        """Figures of the devices that the profile was measured on, by their kind in the profile."""


class StageExchanges(Protocol):
    """What the ranks of a stage exchange inside it, priced."""

    def seconds(self, ranks: tuple[int, ...], samples: int) -> tuple[Array, Array]:
        """(forward, backward) by layer, of a micro-batch of ``samples``."""

    def errors(self) -> Iterable[tuple[str, float]]:
        """What all such plans share beyond errors of other plans: a factor's name, its deviation."""

    def around(self, kinds: set[str], has_layouts: bool) -> Iterable[str]:
        """What layers of these kinds exchange, in the words of :data:`planner.ir.cluster.AROUND`."""


class PartPrices(Protocol):
    """Prices of stages that run micro-batches in parts, one after the other."""

    def stages(
        self, kind: str, layers: Sequence[int], sizes: Iterable[Size], recompute: bool
    ) -> Mapping[Size, StageCost]:
        """A stage of one rank with the layers of these indices, for one part of every micro-batch, by part."""


class PlannerExtra(Extra):
    """What an extra may add to the planner."""

    solvers: ClassVar[ImportPaths] = MappingProxyType({})
    """Published planners: ``(problem, progress) -> Plan`` by the name that ``--solver`` takes."""

    allows: ClassVar[Collection[str]] = ()
    """Families of dims that ``--allow`` takes with it alone."""

    def stated_s(self, solver: str) -> float | None:
        """The time limit that the authors of a solver state; None: none that is known here."""
        return None

    def refusals(self, problem: Problem) -> Sequence[Refusal]:
        """What cannot be asked for together; the first that applies is raised."""
        return ()

    def unmet(self, constraints: Constraints, candidate: Candidate) -> str:
        """The request that a candidate does not meet; empty: it meets all that is known here."""
        return ""

    def searches(self) -> Sequence[ContinuedSearch]:
        """Searches that go on where best-first search ended, one after the other."""
        return ()

    def faults(self, decision: Decision, graph: Graph | None) -> Iterable[str]:
        """What is wrong with a plan; without the graph, what can be seen without it."""
        return ()

    def layer_faults(self, decision: Decision, graph: Graph) -> Iterable[tuple[str, str]]:
        """Layers of a plan and what is wrong with them."""
        return ()

    def division_in_blocks(self, graph: Graph, plain: Division, blocks: Sequence[Block]) -> Division | None:
        """``plain``, of a stage some of whose layers run in blocks."""
        return None

    def cost_in_blocks(
        self, prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], blocks: Sequence[Block]
    ) -> StageCost | None:
        """What such a stage costs; ``chosen``: its layers by index in the graph."""
        return None

    def ordered_axis(
        self, graph: Graph, lengths: tuple[int, ...], ranks: Sequence[tuple[int, ...]]
    ) -> OrderedAxis | None:
        """The axis along which micro-batches are cut into parts of these lengths, one after the other."""
        return None

    def order_of_parts(self, schedule: str, order: Order, pipeline: Pipeline) -> Schedule | None:
        """The schedule of parts of micro-batches, of ``order``, that of whole ones."""
        return None

    def part_prices(self, cost_model: CostModel) -> PartPrices | None:
        """What stages cost that run such parts."""
        return None

    def part_shapes(self, graph: Graph) -> Callable[[SizedLayer], Iterator[tuple[tuple[int, ...], int]]] | None:
        """Of a sized layer, the parts along the axis that a profile measures, and what comes before each."""
        return None

    def stage_exchanges(self, profile: Profile) -> StageExchanges | None:
        """What the ranks of a stage exchange inside, beside what the core knows; None: nothing."""
        return None

    def preparations(self, profile: Profile) -> Preparations | None:
        """What it costs to prepare inputs on the host; None: as they were measured, in proportion to samples."""
        return None

    def kinds_of(self, device: DeviceSpec, devices: Sequence[DeviceSpec]) -> Mapping[str, DeviceSpec]:
        """The device as it reads its parameters, by further kinds of costs; ``devices``: all of the cluster."""
        return {}

    def read_beside(self, work: LayerWork, device: DeviceSpec) -> tuple[int, float]:
        """Bytes that a layer reads from a memory beside the main one, and the least seconds for them."""
        return 0, 0.0

    def main_memory_kind(self, kind: str) -> str | None:
        """The kind of costs of such a device whose parameters are in its main memory."""
        return None

    def bytes_beside(self, costs: StageCosts, rank: int) -> int:
        """Bytes of a rank's parameters, gradients and optimiser state that lie in a memory beside the main one."""
        return 0

    def machines(self, path: str | Path, cluster: Cluster) -> DescribedMachines | None:
        """The machines that a cluster file describes; ``cluster``: that of a profile, whose kinds it may name."""
        return None

    def with_device_figures(self, profile: Profile) -> Profile:
        """The profile with figures of its devices that were not measured."""
        return profile

    def device_name(self, kind: str, memory_bytes: int) -> str:
        """What plans may call the device that its driver calls ``kind``; empty: it is not known here."""
        return ""

    def systems(self) -> Iterable[str]:
        """Names of machines that ``profile --on`` takes."""
        return ()
