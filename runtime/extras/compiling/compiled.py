"""Stages that torch.compile makes faster, divided ones included.

A stage's function is a graph already, cut from the captured one; what remains Python in it (forms, exchanges, boxes)
depends on sizes alone.  So torch.compile is not asked to read that Python: it is run once for each size with the
compiler watching, which records every operator in one graph, collectives included.  Three things follow:

- what is compiled must move its data by :mod:`runtime.extras.compiling.collective`: operators are all that is
  seen;
- a graph belongs to one size, named by ``key``;
- numbers that are new in every step must come as tensors: random draws, whose seed is Python's, would be frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.dense.user_functions import is_user_function
from planner.ir.errors import UnsupportedModelError
from runtime import spatial
from runtime.captured import CapturedModule
from runtime.extras.compiling.collective import CollectiveOrder, CollectivePeerGroup, Collectives, open_collectives
from runtime.optim.ties import groups_of
from runtime.rank import Compiler, RankContext
from runtime.recent import Recent
from runtime.sparse.rules import SharedSites
from runtime.stage.cut import StageFunction, TensorFunction
from runtime.stage.functions import StageCut
from runtime.stage.random.streams import RandomNodes


class CompiledStages:
    """See :class:`runtime.stage.builder.StageCompiler`.

    Raises:
        UnsupportedModelError: a stage has token slices or computes spans again.
    """

    def __init__(self, context: RankContext, compiler: Compiler) -> None:
        _refuse(context)
        decision = context.decision
        graph = context.graph
        self._decision = decision
        self._compiler = compiler
        self._drawing = RandomNodes(context.model).layers
        together = {number: stage.ranks for number, stage in enumerate(decision.stages) if len(stage.ranks) > 1}
        groups = (*groups_of(decision, graph), *spatial.groups_in(decision, graph))
        self._collectives = open_collectives(together, groups, context.deadline_s)

    def peers(self, stage: int) -> CollectivePeerGroup:
        return CollectivePeerGroup(self._collectives[stage], self._decision.stages[stage].ranks)

    def compiled(
        self, stage: int, cut: StageCut, training: StageFunction, shared: spatial.DividedStage | SharedSites | None
    ) -> StageFunction:
        if isinstance(shared, SharedSites):
            raise UnsupportedModelError(
                f"stage {stage} shares out sites, which is not compiled", [], ["run without --compile"]
            )
        refuse_draws(stage, cut.layers, self._drawing)
        refuse_user_code(stage, cut.model, cut.layers)
        return compiled(
            training, lambda: None if shared is None else shared.division, self._compiler, self._collectives.get(stage)
        )


def compiled(
    function: StageFunction,
    key: Callable[[], Hashable],
    backend: Compiler = "inductor",
    collectives: Collectives | None = None,
) -> StageFunction:
    """``function``, compiled for each size that comes along; the first run of a size is not.

    That run works out, from real tensors, what forms keep for the size.

    Args:
        key: tells the sizes that are being run apart, beside the function's own integers: for a divided stage, the
            division.
        backend: as torch.compile's.
        collectives: by which the stage moves its data; None: it is on one rank.
    """
    order = CollectiveOrder() if collectives is None else collectives.order
    return replace(function, function=_BySize(function.function, 1 + len(function.sizes), key, backend, order))


def refuse_draws(stage: int, layers: Iterable[str], drawing: Collection[str]) -> None:
    """Raises :class:`UnsupportedModelError` if one of the stage's layers draws random numbers.

    Args:
        drawing: the layers of the model that do, as :class:`runtime.stage.random.streams.RandomNodes` finds them.
    """
    drawn = [layer for layer in layers if layer in drawing]
    if drawn:
        raise UnsupportedModelError(
            f"stage {stage} cannot be compiled: its random numbers would be the same in every step",
            [f"layers that draw: {', '.join(drawn)}"],
            ["put them on a stage of their own", "run without compiling"],
        )


def refuse_user_code(stage: int, model: CapturedModule, layers: Collection[str]) -> None:
    """Raises :class:`UnsupportedModelError` where a stage runs code that torch.compile is not to look into."""
    nodes = [node for node in model.graph_module.graph.nodes if is_user_function(node) or is_unit(node)]
    refused = [layer for node in nodes if (layer := model.layer_of_node.get(node.name)) in layers]
    if refused:
        raise UnsupportedModelError(
            f"stage {stage} cannot be compiled: it runs autograd Functions of the user's, or shapes follow from data",
            [f"layers: {', '.join(map(str, refused))}"],
            ["put them on a stage of their own", "run without compiling"],
        )


class _BySize:
    def __init__(
        self,
        run: TensorFunction,
        num_integers: int,
        key: Callable[[], Hashable],
        backend: Compiler,
        order: CollectiveOrder,
    ) -> None:
        self._run = run
        self._num_integers = num_integers
        self._key = key
        self._backend = backend
        self._order = order
        self._runs = Recent[Hashable, TensorFunction | None]()

    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        self._order.end()  # a run that failed may have left it watched
        integers = arguments[: self._num_integers]
        tensors = arguments[self._num_integers :]
        key = (self._key(), integers)
        if key not in self._runs:
            self._runs[key] = None
            return self._run(*arguments)
        run = self._runs[key]
        if run is None:
            run = self._runs[key] = self._compiled(integers)
        return run(*tensors)

    def _compiled(self, integers: tuple[int, ...]) -> TensorFunction:
        run = partial(self._run, *integers)
        order = self._order

        def at_size(*tensors: Tensor) -> tuple[Tensor, ...]:
            return order.watched(run, tensors)

        allow: Callable[[TensorFunction], TensorFunction] = torch.compiler.allow_in_graph
        recorded = allow(at_size)

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            return recorded(*tensors)

        return torch.compile(_with_own_code(call), fullgraph=True, dynamic=False, backend=self._backend)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function``: torch.compile counts, and limits, recompilations by code, and sizes are no mistakes."""
    code: CodeType = function.__code__
    return FunctionType(code.replace(), function.__globals__, function.__name__, None, function.__closure__)


def _refuse(context: RankContext) -> None:
    """Raises :class:`UnsupportedModelError` where a stage that is to be compiled has slices or computes spans again."""
    if context.decision.token_slices:
        remedies = ["run without --compile", "plan without --allow time and --token-slices"]
        raise UnsupportedModelError("stages with token slices are not compiled", [], remedies)
    for number, stage in enumerate(context.decision.stages):
        if stage.recomputed:
            raise UnsupportedModelError(
                f"stage {number} computes {len(stage.recomputed)} spans of layers again, and is not compiled then",
                [f"the first has {len(stage.recomputed[0])} layers, from {stage.recomputed[0][0]}"],
                ["run without --compile", "plan with --recompute always, or never"],
            )
