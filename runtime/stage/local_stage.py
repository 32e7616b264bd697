r"""A stage on a rank, from the captured graph to the update of its weights.

    captured   x -> [conv] -> [bn] -> [relu] -> [fc] -> loss        the whole model (:mod:`profiler.capture`)
                                      \____stage 1____/
    cut        (bn, targets; fc.weight, fc.bias) -> (loss,)         functions of inputs and state, in training and
                                                                    evaluation (:mod:`runtime.stage.functions`)
    built      F, B, I, W of micro-batches; sums over the stage's ranks, an optimiser
                                                                    (:class:`StageBuilder`: a program and its updates)
    bound      rows 0 ... 5 of 8 of micro-batch 0, ...              this rank's shares of a batch
                                                                    (:mod:`runtime.pipeline.specialize`)
    run        feed, forward | backward | reduce_gradients, update  what the executor calls (:class:`LocalStage`)

Of a batch of other sizes a stage is bound anew; it is cut and built once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

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
from runtime.numerics.finite import all_finite
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.optim.of_stage import Updates, updates_of
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import ShardedParameters
from runtime.pipeline.microbatches import Batch
from runtime.rank import RankContext
from runtime.stage.cut import StageFunction, normalising_layers
from runtime.stage.functions import StageCut, StageFunctions
from runtime.stage.modes import MicrobatchShard, RunConfig
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.stage.sample_weights import is_factor, weighed_in
from runtime.stage.stage import StageProgram
from runtime.transport.base import exchange_key

if TYPE_CHECKING:
    from runtime.optim.pass_shards import PassShards
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
        decision = context.decision
        graph = context.graph
        ranks = tuple(sorted(decision.stages[stage].ranks))
        actions = [action for action in context.row if action.stage == stage]
        run_config = RunConfig.of(actions, decision.stages[stage].recompute, self._model.autocast)
        divided = self._divided(stage)
        sites = self._sites(stage)
        is_shared = divided is not None and context.boundaries.axis is None
        parts = spatial.parts_of(self._model, decision, stage, context.rank) if is_shared else {}
        passes = self._passes(stage, run_config)
        functions = self._functions(stage, self._cut(stage, parts, passes), run_config, divided, sites)
        function = functions.training
        received = tuple(name for name in function.inputs if name not in graph.inputs and not is_factor(name))
        self._check_received(stage, received)
        loss = graph.loss if graph.loss in function.outputs else None
        is_spoken_for = divided is not None and context.rank != ranks[0]  # where layers are divided, sums are whole
        terms = dict.fromkeys(loss_terms(graph), 0.0 if is_spoken_for else 1.0)
        values = graph.values()
        parameters = function.parameters
        silent = without_gradient(graph)
        crossing = {value for edge in context.program.stages.out_of(stage) for value in edge.values}
        answered = {name for name in crossing if values[name].is_float} - silent - {graph.loss}
        places = {} if passes is None else passes.places(self._model, parameters, received)
        updates = updates_of(context, stage, parameters, parts, places)
        if passes is not None:
            passes.shards = updates.in_passes
        if divided is not None and isinstance(updates.reduction, GradientBuckets):
            divided.later.added = updates.reduction.note
            updates.reduction.put_off = divided.later.targets
        slices = None if updates.in_passes is None else updates.in_passes.slices
        program = StageProgram(
            function,
            frozenset(received),
            loss,
            run_config,
            terms=terms,
            current=functions.current,
            variant=functions.variant,
            rng=self._rng,
            divided=divided or sites or passes,
            added=None if updates.reduction is None else updates.reduction.note,
            slices=None if slices is None else {name: part.view for name, part in slices.items()},
            span_recompute=functions.span_recompute,
        )
        return LocalStage(
            program,
            ranks,
            (),
            received,
            tuple(name for name in function.outputs if name in answered),
            (),
            parameters,
            {name: value for name, value in function.tensors.items() if name not in parameters},
            updates,
            partial(context.transport.all_reduce, ranks=ranks),
        )

    def _cut(self, stage: int, parts: spatial.Parts, passes: ShardedPasses | None) -> StageCut:
        context = self._context
        model = self._model
        layers = frozenset(context.decision.layers_of(stage))
        outputs = dict.fromkeys(value for edge in context.program.stages.out_of(stage) for value in edge.values)
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
        ranks = tuple(sorted(decision.stages[stage].ranks))
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
            wire = required(parts, "runtime", "micro-batches in parts")
        elif stage not in context.divided:
            return None
        elif self._compiler is None:
            wire = spatial.PeerGroup(context.transport, context.decision.stages[stage].ranks)
        else:
            wire = self._compiler.peers(stage)
        layers = context.decision.layers_of(stage)
        return spatial.DividedStage(self._model, layers, wire, spatial.DeferredGradients())

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

    def _check_received(self, stage: int, received: tuple[str, ...]) -> None:
        expected = {value for edge in self._context.program.stages.into(stage) for value in edge.values}
        if expected != set(received):
            differ = ", ".join(sorted(expected ^ set(received)))
            raise UnsupportedModelError(f"stage {stage}: the model's graph and its code disagree on {differ}")


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


@dataclass(slots=True)
class AccumulationStep:
    """Where a step stands among the ``count`` steps whose gradients make up one update.

    Attributes:
        checks: whether each stage looks by itself at the gradients and losses that it has.
        is_spoilt: something is NaN or infinite since the first of these steps: no update is made of it.
    """

    count: int = 1
    number: int = 0
    checks: bool = False
    is_spoilt: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the gradients of earlier steps are used up."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether gradients are summed and weights updated."""
        return self.number == self.count - 1

    def advance(self) -> None:
        """The next step."""
        self.number = (self.number + 1) % self.count
        self.is_spoilt &= not self.is_first

    def go_back(self) -> None:
        """The step before."""
        self.number = (self.number - 1) % self.count


Feed = Callable[[Batch], torch.Tensor]
"""From the batch of a step, this rank's part of one graph input."""


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage on this rank.

    Attributes:
        ranks: that run the stage, by growing number.
        shares: this rank's part of each micro-batch.
        received: names of inputs that other stages make.
        handed_on: names of the differentiable outputs that other stages read.
        feeds: by micro-batch, how each graph input that the stage reads is cut from the global batch.
        parameters, buffers: by the user's names.
        updates: how the parameters are updated.
        add: sums a tensor over ``ranks``, in place.
        accumulation: of the running step.
    """

    program: StageProgram
    ranks: tuple[int, ...]
    shares: tuple[MicrobatchShard, ...]
    received: tuple[str, ...]
    handed_on: tuple[str, ...]
    feeds: tuple[Mapping[str, Feed], ...]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    updates: Updates
    add: Callable[[torch.Tensor], None]
    accumulation: AccumulationStep = field(default_factory=AccumulationStep)

    @property
    def optimizer(self) -> StageOptimizer | None:
        """None where there is nothing to train."""
        return self.updates.optimizer

    @property
    def gathered(self) -> PassShards | None:
        """The parameters of the stage that its ranks have in slices between passes; None: they are whole."""
        shards = self.updates.in_passes
        return shards if shards is not None and shards.gathers else None

    def feed(self, batch: Batch, microbatch: int) -> dict[str, torch.Tensor]:
        """The graph inputs that the stage reads, this rank's part of a micro-batch."""
        return {name: cut(batch) for name, cut in self.feeds[microbatch].items()}

    def forward(self, microbatch: int, values: Mapping[str, torch.Tensor], version: int = 0) -> dict[str, torch.Tensor]:
        """Run the stage forward on this rank's share, on ``version`` of its weights."""
        share = self.shares[microbatch]
        return self.program.forward(share, values, share.loss_weight / self.accumulation.count, version)

    def evaluate(self, microbatch: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the stage forward in evaluation mode on this rank's share."""
        return self.program.evaluate(self.shares[microbatch], values)

    def answer(
        self, microbatch: int, values: Mapping[str, torch.Tensor], *, training: bool, frozen: frozenset[str]
    ) -> dict[str, torch.Tensor]:
        """Run the stage forward on this rank's share of a stream; see :meth:`StageProgram.answer`."""
        return self.program.answer(self.shares[microbatch], values, training=training, frozen=frozen)

    def expect_last(self) -> None:
        """Call before the last action of the stage that adds to its gradients.

        From there on each sum of gradients starts as soon as they are complete.
        """
        if self.accumulation.is_last and self.updates.reduction is not None:
            self.updates.reduction.arm()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the stage's ranks; without effect until the last step before an update."""
        if self.accumulation.is_last and self.updates.reduction is not None:
            self.updates.reduction.reduce()

    def update(self) -> None:
        """One step of the optimiser and of its schedule; without effect until the last step before an update."""
        if self.accumulation.checks and not self.accumulation.is_spoilt:
            self.accumulation.is_spoilt = not self._agrees(self.is_finite())
        if self.accumulation.is_last:
            self.program.before_update()  # also without an optimiser: versions are counted
            if self.optimizer is not None and not self.accumulation.is_spoilt:
                self.optimizer.step()

    def is_finite(self, *, gradients: bool = True) -> bool:
        """Whether the losses so far, and the ``gradients`` that this rank updates by, are numbers and finite."""
        samples = [share.num_samples for share in self.shares]
        tensors = [loss for microbatch, loss in self.program.losses.items() if samples[microbatch]]
        if gradients and self.optimizer is not None:
            tensors += [each.grad for each in self.optimizer.tensors.values() if each.grad is not None]
        return all_finite(tensors)

    def _agrees(self, finite: bool) -> bool:
        """Ranks that divide an optimiser step together or not at all."""
        if not (self.accumulation.is_last and isinstance(self.updates.reduction, ShardedParameters)):
            return finite
        bad = torch.tensor([float(not finite)])
        self.add(bad)
        return not bad.item()

    def reset(self, step: int = 0) -> None:
        """Forget the last step: its micro-batches, and its gradients unless this one, ``step``, adds to them."""
        self.program.reset(step)
        if self.accumulation.is_first:
            self.forget_gradients()
        if self.updates.reduction is not None:
            self.updates.reduction.reset()

    def forget_gradients(self) -> None:
        """The gradients that were there have been used."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.updates.in_passes is not None:
            self.updates.in_passes.forget()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The last step's, by name; where ranks divide the optimiser, all of the stage have to call this together."""
        reduction = self.updates.reduction
        reduced = reduction.gradients() if isinstance(reduction, ShardedParameters) else {}
        return {
            name: gradient
            for name, parameter in self.parameters.items()
            if (gradient := reduced.get(name, parameter.grad)) is not None
        }

    def loss(self) -> float:
        """The sum of the last step's losses on this rank, each times its samples; an empty share has none."""
        samples = (share.num_samples for share in self.shares)
        losses = self.program.losses
        return sum(losses[m].item() * count for m, count in enumerate(samples) if count and m in losses)
