"""From a decision and a captured graph to the stages that live on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cuda_ops.device.placing import on_device
from planner.ir.errors import CorruptFileError, UnsupportedModelError
from planner.ir.graph import Graph, producer
from planner.ir.plan import Decision
from planner.ir.schedule import StageGraph
from planner.layers import require_micro_batches
from planner.layers.boundary import Boundaries, loss_terms, without_gradient
from planner.layers.division import Division, divides
from planner.layers.recomputed import span_faults
from planner.layers.stage_rules import boxes_in, refused_slices, require_stages
from runtime import spatial
from runtime.optim.of_stage import TiedParameters, groups_of_ties, ties_of, updates_of
from runtime.optim.sharding import GradientBuckets
from runtime.stage.captured import CapturedModel, attribute
from runtime.stage.cut import normalising_layers
from runtime.stage.functions import StageCut, StageFunctions
from runtime.stage.local_stage import LocalStage
from runtime.stage.modes import RunConfig
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.stage.sample_weights import is_factor, weighed_in
from runtime.stage.stage import StageProgram
from runtime.transport import Exchanging, Transport
from runtime.transport.base import exchange_key

if TYPE_CHECKING:
    from runtime.sparse.rules import SharedSites
    from runtime.stage.sharded_passes import ShardedPasses
    from runtime.transport.small_allgather import RowGather


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def groups_of(decision: Decision, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that sum over each other, for the transport: of stages on several ranks, and of ties."""
    groups = {tuple(sorted(stage.ranks)): None for stage in decision.stages if len(stage.ranks) > 1}
    if any(divides(decision, stage, graph) for stage in range(len(decision.stages))):
        groups |= dict.fromkeys(spatial.groups_of_parameters(graph, decision))
    return tuple(groups | dict.fromkeys(groups_of_ties(ties_in(decision, graph))))


def ties_in(decision: Decision, graph: Graph) -> tuple[TiedParameters, ...]:
    """The parameters that several stages use."""
    stage_of = {name: placement.stage for name, placement in decision.layers.items()}
    ties = ties_of(graph, stage_of, [stage.ranks for stage in decision.stages])
    return tuple(part for tie in ties for part in _in_parts(tie, decision, graph))


def _in_parts(tie: TiedParameters, decision: Decision, graph: Graph) -> Iterator[TiedParameters]:
    """A tie for the ranks of each part; stages that use other parts are refused elsewhere (``parts_of``)."""
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name in tie.names:
        boxes = [boxes_in(graph, decision, stage, name) for stage in tie.stages]
        for box in dict.fromkeys(boxes[0]):
            ranks = tuple(
                tuple(sorted(rank for rank, own in zip(decision.stages[stage].ranks, of, strict=True) if own == box))
                for stage, of in zip(tie.stages, boxes, strict=True)
            )
            names.setdefault(ranks, []).append(name)
    yield from (TiedParameters(tuple(own), tie.stages, ranks) for ranks, own in names.items())


def check_layers(decision: Decision, graph: Graph) -> None:
    """Raises :class:`CorruptFileError` unless the decision places exactly the graph's layers, and spans can run."""
    names = graph.by_name()
    faults = [f"layer {name} is in no stage" for name in names if name not in decision.layers]
    faults += [f"layer {name} is not in the model" for name in decision.layers if name not in names]
    if faults:
        raise CorruptFileError("the plan's layers are not those of the model", faults[:20])
    wrong_spans = [fault for stage in range(len(decision.stages)) for fault in span_faults(decision, stage, graph)]
    if wrong_spans:
        raise CorruptFileError("the plan's layers cannot be computed again so", wrong_spans[:20])


class StageBuilder:
    """Builds the stages of one rank.

    Their shares of micro-batches are given them later (:mod:`runtime.pipeline.specialize`).

    Args:
        stages: the program's DAG of stages.
        seed: of what layers draw.
        compiler: backend of torch.compile for the stages' training functions, whose ranks then exchange by collectives;
            None: they are not compiled.
        device: to which what the stages use is moved, in place; None: it stays where it is.
        answers: values that are wanted of the stages that make them, whoever reads them.
    """

    def __init__(
        self,
        decision: Decision,
        model: CapturedModel,
        boundaries: Boundaries,
        stages: StageGraph,
        transport: Transport,
        make_optimizer: MakeOptimizer,
        *,
        seed: int = 0,
        compiler: spatial.Compiler | None = None,
        device: torch.device | None = None,
        answers: Iterable[str] = (),
    ) -> None:
        self._answers = tuple(answers)
        if device is not None:
            model = replace(model, graph_module=on_device(model.graph_module, device))
        self._decision, self._model, self._boundaries, self._stages = decision, model, boundaries, stages
        self._device = device
        self._transport, self._make_optimizer = transport, make_optimizer
        self._rng = CounterRng(seed)
        self._draws = RandomNodes(model)
        self._node_places = {node.name: place for place, node in enumerate(model.graph_module.graph.nodes)}
        self._row = decision.rows()[transport.rank]
        self._compiler = compiler
        self._collectives: Mapping[int, spatial.Collectives] = {}
        if compiler is not None:
            _refuse_spans(decision)
            together = {number: stage.ranks for number, stage in enumerate(decision.stages) if len(stage.ranks) > 1}
            groups = (*groups_of(decision, model.graph), *spatial.groups_in(decision, model.graph))
            self._collectives = spatial.open_collectives(together, groups, transport.deadline_s)

    @property
    def layers_by_micro_batch(self) -> tuple[str, ...]:
        """Layers that draw random numbers by micro-batch, or take statistics of one."""
        return tuple(dict.fromkeys((*self._draws.layers, *normalising_layers(self._model))))

    def local_stages(self) -> dict[int, LocalStage]:
        """The stages that run on this rank.

        Raises:
            UnsupportedModelError: the plan asks for something that this model or runtime cannot do.
        """
        require_stages(self._decision, self._model.graph)
        if self._decision.token_slices and self._compiler is not None:
            raise UnsupportedModelError(
                "stages with token slices are not compiled",
                [],
                ["run without --compile", "plan without --allow time and --token-slices"],
            )
        require_micro_batches(self._decision, self._model.graph)
        rank, stages = self._transport.rank, self._decision.stages
        return {index: self._local_stage(index) for index, stage in enumerate(stages) if rank in stage.ranks}

    def _cut(self, stage: int, parts: spatial.Parts, passes: ShardedPasses | None) -> StageCut:
        graph, layers = self._model.graph, frozenset(self._decision.layers_of(stage))
        outputs = dict.fromkeys(value for edge in self._stages.out_of(stage) for value in edge.values)
        if producer(graph.loss) in layers:
            outputs[graph.loss] = None
        outputs |= dict.fromkeys(value for value in self._answers if producer(value) in layers)
        watched = (value for value in self._model.watched if producer(value) in layers)
        whole = {name: self._attribute(name) for name in parts}
        own, weighed = spatial.sliced(whole, parts) if parts else {}, weighed_in(self._model, layers)
        recomputed = self._decision.stages[stage].recomputed
        return StageCut(
            self._model, layers, tuple(outputs), tuple(watched), own, self._device, weighed, passes, recomputed
        )

    def _local_stage(self, stage: int) -> LocalStage:
        graph, decision, transport = self._model.graph, self._decision, self._transport
        ranks = tuple(sorted(decision.stages[stage].ranks))
        add = partial(transport.all_reduce, ranks=ranks)
        divided, run_config, sites = self._divided(stage), self._run_config(stage), self._sites(stage)
        is_shared = divided is not None and not decision.token_slices
        parts = spatial.parts_of(self._model, decision, stage, transport.rank) if is_shared else {}
        passes = self._passes(stage, run_config)
        functions = self._functions(stage, parts, run_config, divided, sites, passes)
        function = functions.training
        received = tuple(name for name in function.inputs if name not in graph.inputs and not is_factor(name))
        self._check_received(stage, received)
        loss = graph.loss if graph.loss in function.outputs else None
        is_spoken_for = divided is not None and transport.rank != ranks[0]  # where layers are divided, sums are whole
        terms = dict.fromkeys(loss_terms(graph), 0.0 if is_spoken_for else 1.0)
        values, parameters, silent = graph.values(), function.parameters, without_gradient(graph)
        crossing = {value for edge in self._stages.out_of(stage) for value in edge.values}
        answered = {name for name in crossing if values[name].is_float} - silent - {graph.loss}
        updates = updates_of(
            stage,
            parameters,
            ranks,
            ties_in(decision, graph),
            transport,
            self._make_optimizer,
            zero=decision.stages[stage].level,
            parts=parts,
            places={} if passes is None else passes.places(self._model, parameters, received),
            is_alone=len(decision.stages) == 1,
        )
        if passes is not None:
            passes.shards = updates.in_passes
        if divided is not None and isinstance(updates.reduction, GradientBuckets):
            divided.later.added, updates.reduction.put_off = updates.reduction.note, divided.later.targets
        return LocalStage(
            StageProgram(
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
                slices=None
                if updates.in_passes is None
                else {name: part.view for name, part in updates.in_passes.slices.items()},
                span_recompute=functions.span_recompute,
            ),
            ranks,
            (),
            received,
            tuple(name for name in function.outputs if name in answered),
            (),
            parameters,
            {name: value for name, value in function.tensors.items() if name not in parameters},
            updates,
            add,
        )

    def _functions(
        self,
        stage: int,
        parts: spatial.Parts,
        run_config: RunConfig,
        divided: spatial.DividedStage | None,
        sites: SharedSites | None,
        passes: ShardedPasses | None,
    ) -> StageFunctions:
        ranks, collectives = tuple(sorted(self._decision.stages[stage].ranks)), self._collectives.get(stage)
        talks = self._transport if collectives is None else collectives
        functions = StageFunctions(
            self._cut(stage, parts, passes),
            partial(self._rows, stage, ranks, talks) if len(ranks) > 1 else None,
            self._draws.rule(self._rng, max(len(ranks), self._decision.num_slices), self._places(divided)),
            halves=bool(run_config.split) and self._compiler is None,
            divided=divided,
            sites=sites,
            blocks=self._decision.stages[stage].blocks,
            contexts=[each for each in (self._rng, divided or sites) if each is not None],
        )
        if self._compiler is not None:
            spatial.refuse_draws(stage, self._decision.layers_of(stage), self._draws.layers)
            spatial.refuse_user_code(stage, self._model, self._decision.layers_of(stage))
            whole, size = functions.training, partial(_size, divided)
            functions.training = spatial.compiled(whole, size, self._compiler, collectives)
        return functions

    def _rows(self, stage: int, ranks: tuple[int, ...], talks: Exchanging, node: str) -> RowGather:
        """How ``ranks`` tell each other about a node, under a key as divided stages have.

        The key is that of ``runtime.spatial.layer_shard``.
        """
        from runtime.transport.small_allgather import RowGather  # late: a rank alone tells nobody

        place = self._node_places.get(node)  # of a graph inside the graph: none
        return RowGather(talks, ranks, None if place is None else exchange_key(stage, place))

    def _places(self, divided: spatial.DividedStage | None) -> spatial.DrawnPlaces | None:
        """Where the parts lie that layers of a divided stage draw for."""
        if divided is None:
            return None
        shard = partial(divided.shard, training=True)
        layers, placements = self._model.graph.by_name(), self._decision.layers
        if self._boundaries.axes is not None:
            placements = {name: self._boundaries.axes.placement(name, self._decision.token_slices) for name in layers}
        return spatial.DrawnPlaces(shard, layers, placements)

    def _attribute(self, name: str) -> Tensor:
        return cast(Tensor, attribute(self._model.graph_module, name))

    def _divided(self, stage: int) -> spatial.DividedStage | None:
        if self._decision.token_slices:
            peers = spatial.SlicePeers(self._decision.num_slices)
            return self._divided_by(stage, peers)
        if not divides(self._decision, stage, self._model.graph):
            return None
        ranks, collectives = self._decision.stages[stage].ranks, self._collectives.get(stage)
        if collectives is None:
            wire = spatial.PeerGroup(self._transport, ranks)
        else:
            wire = spatial.CollectivePeerGroup(collectives, ranks)
        return self._divided_by(stage, wire)

    def _divided_by(self, stage: int, wire: spatial.PeerGroup) -> spatial.DividedStage:
        return spatial.DividedStage(self._model, self._decision.layers_of(stage), wire, spatial.DeferredGradients())

    def _sites(self, stage: int) -> SharedSites | None:
        """How a stage of several ranks shares out the sites of a sparse network."""
        ranks = self._decision.stages[stage].ranks
        if self._model.prepared is None or len(ranks) == 1:
            return None
        from runtime.sparse.rules import SharedSites, require_shareable
        from runtime.sparse.sampled import shares_seeds

        if shares_seeds(self._model.prepared):  # each rank samples for its own: there is nothing to exchange
            return None
        require_shareable(self._model.graph, frozenset(self._decision.layers_of(stage)), stage)
        if divides(self._decision, stage, self._model.graph):
            raise UnsupportedModelError(
                f"stage {stage} cannot share out sites: a term of its loss is read by other layers",
                [f"{len(ranks)} ranks; sums over sites and over terms are not put together"],
                ["put that stage on one rank", "a loss of one term, such as SiteCrossEntropy of the last level"],
            )
        if self._compiler is not None:
            raise UnsupportedModelError(
                f"stage {stage} shares out sites, which is not compiled", [], ["run without --compile"]
            )
        return SharedSites(
            {node: value for value, node in self._model.node_of_value.items()},
            spatial.PeerGroup(self._transport, ranks),
        )

    def _passes(self, stage: int, run_config: RunConfig) -> ShardedPasses | None:
        """What follows the passes of a stage whose ranks have gradients or parameters in slices; None: they do not.

        Raises:
            UnsupportedModelError: nothing runs such a stage.
        """
        decision = self._decision
        if decision.stages[stage].level < 2 or len(decision.stages[stage].ranks) < 2 or not run_config.trains:
            return None
        from runtime.stage.sharded_passes import ShardedPasses  # late: few plans divide so much

        wrong = {
            "weight gradients are left for later (a split backward)": bool(run_config.split),
            f"schedule {decision.schedule} keeps versions of the weights": bool(run_config.version_uses),
            "stages are compiled (run without --compile)": self._compiler is not None,
        }
        if any(wrong.values()):
            raise refused_slices(decision, stage, [reason for reason, is_so in wrong.items() if is_so])
        return ShardedPasses(self._model, decision.layers_of(stage))

    def _run_config(self, stage: int) -> RunConfig:
        actions = [action for action in self._row if action.stage == stage]
        return RunConfig.of(actions, self._decision.stages[stage].recompute, self._model.autocast)

    def _check_received(self, stage: int, received: tuple[str, ...]) -> None:
        expected = {value for edge in self._stages.into(stage) for value in edge.values}
        if expected != set(received):
            differ = ", ".join(sorted(expected ^ set(received)))
            raise UnsupportedModelError(f"stage {stage}: the model's graph and its code disagree on {differ}")


def _refuse_spans(decision: Decision) -> None:
    """Raises :class:`UnsupportedModelError` where a stage that is to be compiled computes layers again by spans."""
    for number, stage in enumerate(decision.stages):
        if stage.recomputed:
            raise UnsupportedModelError(
                f"stage {number} computes {len(stage.recomputed)} spans of layers again, and is not compiled then",
                [f"the first has {len(stage.recomputed[0])} layers, from {stage.recomputed[0][0]}"],
                ["run without --compile", "plan with --recompute always, or never"],
            )


def _size(divided: spatial.DividedStage | None) -> Division | None:
    """What tells the sizes apart that a stage is run with."""
    return None if divided is None else divided.division
