r"""Builds the stages of a rank, from the captured graph to the update of their weights.

    captured   x -> [conv] -> [bn] -> [relu] -> [fc] -> loss        the whole model (:mod:`profiler.capture`)
                                      \____stage 1____/
    cut        (bn, targets; fc.weight, fc.bias) -> (loss,)         functions of inputs and state, in training and
                                                                    evaluation (:mod:`runtime.stage.functions`)
    built      F, B, I, W of micro-batches; sums over the stage's ranks, an optimiser
                                                                    (:class:`StageBuilder`: its passes and its updates)
    bound      rows 0 ... 5 of 8 of micro-batch 0, ...              this rank's shares of a batch
                                                                    (:mod:`runtime.pipeline.specialize`)
    run        feed, forward | backward | reduce_gradients, update  what the executor calls
                                                                    (:class:`runtime.stage.local_stage.LocalStage`)

Of a batch of other sizes a stage is bound anew; it is cut and built once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from cuda_ops.device.placing import on_device
from cuda_ops.preparation import SeparatePreparation
from planner.ir.errors import UnsupportedModelError
from planner.ir.extras import extras, required
from planner.ir.graph import producer
from planner.layers import require_micro_batches
from planner.layers.boundary import loss_terms, without_gradient
from planner.layers.stage_rules import refused_slices, require_stages
from runtime import spatial
from runtime.captured import answers_of, attribute, watched_values
from runtime.extra import RuntimeExtra
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.optim.of_stage import updates_of
from runtime.rank import RankContext
from runtime.stage.cut import StageFunction, normalising_layers
from runtime.stage.functions import StageCut, StageFunctions
from runtime.stage.local_stage import LocalStage
from runtime.stage.modes import RunConfig
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.stage.sample_weights import is_factor, weighed_in
from runtime.stage.stage import StagePasses
from runtime.transport.base import exchange_key

if TYPE_CHECKING:
    from runtime.sparse.rules import SharedSites
    from runtime.stage.sharded_passes import ShardedPasses
    from runtime.transport.small_allgather import RowGather


class StageBuilder:
    """Builds the stages of one rank, without shares of micro-batches.

    Raises:
        UnsupportedModelError: the plan asks for something that this model or runtime cannot do.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._model = context.model
        if context.device is not None:
            self._model = replace(self._model, graph_module=on_device(self._model.graph_module, context.device))
        self._answers = answers_of(self._model) if context.answers else ()
        self._rng = CounterRng(context.seed)
        self._draws = RandomNodes(self._model)
        self._node_places = {node.name: place for place, node in enumerate(self._model.graph_module.graph.nodes)}
        self._compiler: StageCompiler | None = None
        if context.compiler is not None:
            compilers = (extra.stage_compiler(context, context.compiler) for extra in extras(RuntimeExtra))
            self._compiler = required(compilers, "runtime", "stages under torch.compile")

    @property
    def layers_by_micro_batch(self) -> tuple[str, ...]:
        """Layers that draw random numbers by micro-batch, or take statistics of one."""
        return tuple(dict.fromkeys((*self._draws.layers, *normalising_layers(self._model))))

    def local_stages(self) -> dict[int, LocalStage]:
        """The stages that run on this rank."""
        require_stages(self._context.decision, self._context.graph)
        require_micro_batches(self._context.decision, self._context.graph)
        return {stage: self._local_stage(stage) for stage in self._context.stages}

    def _local_stage(self, stage: int) -> LocalStage:
        context = self._context
        graph = context.graph
        ranks = self._ranks(stage)
        run_config = self._run_config(stage)
        divided = self._divided(stage)
        sites = self._sites(stage)
        passes = self._passes(stage, run_config)
        parts = self._parts(stage, divided)
        functions = self._functions(stage, self._cut(stage, parts, passes), run_config, divided, sites)
        function = functions.training
        parameters = function.parameters
        received = self._received(stage, function)
        places = {} if passes is None else passes.places(self._model, parameters, received)
        updates = updates_of(context, stage, parameters, parts, places)
        if passes is not None:
            passes.shards = updates.in_passes
        if divided is not None and isinstance(updates.reduction, GradientBuckets):
            divided.later.added = updates.reduction.note
            updates.reduction.put_off = divided.later.targets
        stage_passes = StagePasses(
            function,
            frozenset(received),
            graph.loss if graph.loss in function.outputs else None,
            run_config,
            terms=self._terms(stage, divided),
            current=functions.current,
            variant=functions.variant,
            rng=self._rng,
            divided=divided or sites or passes,
            added=None if updates.reduction is None else updates.reduction.note,
            slices=updates.slices,
            span_recompute=functions.span_recompute,
        )
        return LocalStage(
            stage_passes,
            ranks,
            (),
            received,
            self._handed_on(stage, function),
            (),
            parameters,
            {name: value for name, value in function.tensors.items() if name not in parameters},
            updates,
            partial(context.transport.all_reduce, ranks=ranks),
        )

    def _ranks(self, stage: int) -> tuple[int, ...]:
        """By growing number."""
        return tuple(sorted(self._context.decision.stages[stage].ranks))

    def _run_config(self, stage: int) -> RunConfig:
        """How this rank's row runs the stage."""
        context = self._context
        actions = [action for action in context.row if action.stage == stage]
        return RunConfig.of(actions, context.decision.stages[stage].recompute, self._model.autocast)

    def _parts(self, stage: int, divided: spatial.DividedStage | None) -> spatial.ParameterParts:
        """What this rank has of parameters and buffers; those that are not named are whole."""
        context = self._context
        if divided is None or context.boundaries.axis is not None:
            return {}
        return spatial.parts_of(self._model, context.decision, stage, context.rank)

    def _received(self, stage: int, function: StageFunction) -> tuple[str, ...]:
        """The inputs that other stages make.

        Raises:
            UnsupportedModelError: they are not what the program sends.
        """
        context = self._context
        received = tuple(name for name in function.inputs if name not in context.graph.inputs and not is_factor(name))
        expected = {value for edge in context.program.stages.into(stage) for value in edge.values}
        if expected != set(received):
            differ = ", ".join(sorted(expected ^ set(received)))
            raise UnsupportedModelError(f"stage {stage}: the model's graph and its code disagree on {differ}")
        return received

    def _terms(self, stage: int, divided: spatial.DividedStage | None) -> dict[str, float]:
        """What the gradients of the loss's terms are begun with; where layers are divided, one rank has whole sums."""
        is_spoken_for = divided is not None and self._context.rank != self._ranks(stage)[0]
        return dict.fromkeys(loss_terms(self._context.graph), 0.0 if is_spoken_for else 1.0)

    def _sent(self, stage: int) -> dict[str, None]:
        """The values that the stage makes for others, in order."""
        return dict.fromkeys(value for edge in self._context.program.stages.out_of(stage) for value in edge.values)

    def _handed_on(self, stage: int, function: StageFunction) -> tuple[str, ...]:
        """Of those, the ones whose gradient comes back."""
        graph = self._context.graph
        values = graph.values()
        sent = self._sent(stage).keys() - without_gradient(graph) - {graph.loss}
        return tuple(name for name in function.outputs if name in sent and values[name].is_float)

    def _cut(self, stage: int, parts: spatial.ParameterParts, passes: ShardedPasses | None) -> StageCut:
        context = self._context
        model = self._model
        layers = frozenset(context.decision.layers_of(stage))
        outputs = self._sent(stage)
        outputs |= dict.fromkeys(v for v in (context.graph.loss, *self._answers) if producer(v) in layers)
        whole = {name: cast(Tensor, attribute(model.graph_module, name)) for name in parts}
        return StageCut(
            model,
            layers,
            tuple(outputs),
            tuple(value for value in watched_values(model) if producer(value) in layers),
            spatial.sliced(whole, parts) if parts else {},
            context.device,
            weighed_in(model, layers),
            passes,
            context.decision.stages[stage].recomputed,
        )

    def _functions(
        self,
        stage: int,
        stage_cut: StageCut,
        run_config: RunConfig,
        divided: spatial.DividedStage | None,
        sites: SharedSites | None,
    ) -> StageFunctions:
        decision = self._context.decision
        compiler = self._compiler
        ranks = self._ranks(stage)
        functions = StageFunctions(
            stage_cut,
            partial(self._rows, stage, ranks) if len(ranks) > 1 else None,
            self._draws.rule(self._rng, max(len(ranks), decision.num_parts), self._places(divided)),
            halves=bool(run_config.split) and compiler is None,
            divided=divided,
            sites=sites,
            blocks=decision.stages[stage].blocks,
            contexts=[each for each in (self._rng, divided or sites) if each is not None],
        )
        if compiler is not None:
            functions.training = compiler.compiled(stage, stage_cut, functions.training, divided or sites)
        return functions

    def _rows(self, stage: int, ranks: tuple[int, ...], node: str) -> RowGather:
        """How ``ranks`` tell each other about a node, under a key as divided stages have.

        The key is that of ``runtime.spatial.layer_shard``.
        """
        from runtime.transport.small_allgather import RowGather  # late: a rank alone tells nobody

        transport = self._context.transport if self._compiler is None else self._compiler.peers(stage).transport
        place = self._node_places.get(node)  # of a graph inside the graph: none
        return RowGather(transport, ranks, None if place is None else exchange_key(stage, place))

    def _places(self, divided: spatial.DividedStage | None) -> spatial.DrawnPlaces | None:
        """Where the parts lie that layers of a divided stage draw for."""
        if divided is None:
            return None
        shard = partial(divided.shard, training=True)
        context = self._context
        layers = self._model.graph.by_name()
        placements = context.decision.layers
        if (axis := context.boundaries.axis) is not None:
            placements = {name: axis.placement(name, context.decision.token_slices) for name in layers}
        return spatial.DrawnPlaces(shard, layers, placements)

    def _divided(self, stage: int) -> spatial.DividedStage | None:
        """How the layers of a stage are divided, over its ranks or over parts of a micro-batch; None: they are not."""
        context = self._context
        if context.boundaries.axis is not None:
            parts = (extra.parts_as_peers(context.decision.num_parts) for extra in extras(RuntimeExtra))
            peers = required(parts, "runtime", "micro-batches in parts")
        elif stage not in context.divided:
            return None
        elif self._compiler is None:
            peers = spatial.PeerGroup(context.transport, context.decision.stages[stage].ranks)
        else:
            peers = self._compiler.peers(stage)
        layers = context.decision.layers_of(stage)
        return spatial.DividedStage(self._model, layers, peers, spatial.DeferredGradients())

    def _sites(self, stage: int) -> SharedSites | None:
        """How a stage of several ranks shares out the sites of a sparse network."""
        context = self._context
        ranks = context.decision.stages[stage].ranks
        preparation = self._model.preparation
        if preparation is None or len(ranks) == 1 or isinstance(preparation, SeparatePreparation):
            return None
        from runtime.sparse.rules import SharedSites, require_shareable  # late: other networks do without

        require_shareable(context.graph, frozenset(context.decision.layers_of(stage)), stage)
        if stage in context.divided:
            raise UnsupportedModelError(
                f"stage {stage} cannot share out sites: a term of its loss is read by other layers",
                [f"{len(ranks)} ranks; sums over sites and over terms are not put together"],
                ["put that stage on one rank", "a loss of one term, such as SiteCrossEntropy of the last level"],
            )
        return SharedSites(
            {node: value for value, node in self._model.node_of_value.items()},
            spatial.PeerGroup(context.transport, ranks),
        )

    def _passes(self, stage: int, run_config: RunConfig) -> ShardedPasses | None:
        """What follows the passes of a stage whose ranks have gradients or parameters in slices; None: they do not.

        Raises:
            UnsupportedModelError: nothing runs such a stage.
        """
        decision = self._context.decision
        if decision.stages[stage].level < 2 or len(decision.stages[stage].ranks) < 2 or not run_config.trains:
            return None
        from runtime.stage.sharded_passes import ShardedPasses  # late: few plans divide so much

        wrong = {
            "weight gradients are left for later (a split backward)": bool(run_config.split),
            f"schedule {decision.schedule} keeps versions of the weights": bool(run_config.version_uses),
            "stages are compiled (run without --compile)": self._context.compiler is not None,
        }
        if any(wrong.values()):
            raise refused_slices(decision, stage, [reason for reason, is_so in wrong.items() if is_so])
        return ShardedPasses(self._model, decision.layers_of(stage))


class StageCompiler(Protocol):
    """Compiles the training functions of a rank's stages, which then exchange by what the compiler sees."""

    def peers(self, stage: int) -> spatial.PeerGroup:
        """The ranks of a stage of several, and what they exchange by."""

    def compiled(
        self, stage: int, cut: StageCut, training: StageFunction, shared: spatial.DividedStage | SharedSites | None
    ) -> StageFunction:
        """The function of a stage, compiled for each size that comes along.

        Args:
            shared: how the ranks of the stage divide layers or share out sites; None: they do not.

        Raises:
            UnsupportedModelError: the stage cannot be compiled.
        """
