"""All that extras may add to the runtime (:mod:`planner.ir.extras` says how)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.extras import Extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from cuda_ops.preparation import InputPreparation
    from planner.ir.graph import Graph
    from planner.ir.plan import Block, Decision
    from planner.layers.boundary import OrderedAxis
    from runtime.checkpoint.reader import TensorFolder
    from runtime.pipeline.routing import Piece
    from runtime.rank import Compiler, RankContext
    from runtime.sparse.ahead import BatchPreparation, PreparationThread
    from runtime.sparse.batch import PreparedInputs
    from runtime.spatial import DividedStage, PeerGroup
    from runtime.stage.builder import StageCompiler
    from runtime.stage.cut import StageFunction
    from runtime.stage.local_stage import LocalStage


class RuntimeExtra(Extra):
    """What an extra may add to the runtime."""

    def batch_preparation(
        self, preparation: InputPreparation, decision: Decision, prepared: PreparedInputs, aside: PreparationThread
    ) -> BatchPreparation[Any] | None:
        """Who prepares batches, in the thread ``aside``; None: the preparation is of no kind known here."""
        return None

    def parts_as_peers(self, num_parts: int) -> PeerGroup | None:
        """The parts of a micro-batch on one rank, as if they were ranks."""
        return None

    def joined_parts(
        self,
        axis: OrderedAxis,
        outputs: Mapping[int, Mapping[str, Piece]],
        rows: Sequence[int],
        num_parts: int,
    ) -> Mapping[int, Mapping[str, Piece]] | None:
        """Outputs of whole micro-batches of ``rows`` samples, of those of their parts, by number and value."""
        return None

    def stage_in_blocks(
        self,
        make: Callable[[frozenset[str], tuple[str, ...]], StageFunction],
        training: StageFunction,
        outputs: tuple[str, ...],
        graph: Graph,
        layers: Sequence[str],
        blocks: Sequence[Block],
        divided: DividedStage,
    ) -> StageFunction | None:
        """A stage in evaluation mode whose layers are run in ``blocks``.

        Args:
            make: a function of some layers that puts out some values.
            training: the stage in training, whose inputs, sizes and attributes it takes in the same order.
            outputs: the values wanted.
            layers: of the stage, in order.
        """
        return None

    def stage_compiler(self, context: RankContext, compiler: Compiler) -> StageCompiler | None:
        """What compiles the stages of a rank."""
        return None

    def rank_folder(self, kept_as: str) -> type[TensorFolder] | None:
        """Who reads the tensors of a rank that a checkpoint says are kept in a way other than today's."""
        return None

    def stream(self, context: RankContext, local_stages: Mapping[int, LocalStage]) -> Any | None:
        """How a rank's stages run batches without an end."""
        return None
