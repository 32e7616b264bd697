"""A stage's functions on one rank: made for training and evaluation, with and without rows, and called.

They are called with and without gradients, and under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from cuda_ops.dense.deferred_gradients import CurrentQueue, deferred
from cuda_ops.dense.recurrent import autocast
from cuda_ops.device.placing import move, tensors_of
from planner.ir.errors import UnsupportedModelError
from planner.ir.extras import extras, required
from planner.ir.plan import Block
from planner.layers.recomputed import Spans
from runtime import spatial
from runtime.captured import CapturedModule
from runtime.extra import RuntimeExtra
from runtime.numerics.finite import Examiner
from runtime.stage.cut import NodeRule, StageAttribute, StageFunction, cut_stage
from runtime.stage.modes import MicrobatchContext, MicrobatchShard, Mode, cannot_evaluate, in_evaluation
from runtime.stage.sample_weights import Weighed, weighing

if TYPE_CHECKING:
    from runtime.sparse.rules import SharedSites
    from runtime.stage.recomputed import SpanRecompute
    from runtime.stage.sharded_passes import ShardedPasses
    from runtime.transport.small_allgather import Tell


Variant = Callable[[Mode], StageFunction]
"""A stage in another mode, with the same inputs, outputs, sizes and attributes."""


class StageCall(NamedTuple):
    """All that it takes to run a stage on a micro-batch, and to run it again.

    Attributes:
        values: the inputs, in order.
        state: the attributes, in order.
    """

    microbatch_shard: MicrobatchShard
    values: tuple[Tensor, ...]
    state: tuple[StageAttribute, ...]


class StageCalls:
    """The functions of one stage, made when they are first needed.

    Args:
        function: for training, on a share with rows.
        variant: None: there is only ``function``.
        contexts: of what is run, before each run: what layers draw by, how they are divided.

    Attributes:
        examiner: runs functions in their place, where it is to be known what each operator makes.
    """

    examiner: Examiner | None = None

    def __init__(
        self,
        function: StageFunction,
        autocast: torch.dtype | None = None,
        variant: Variant | None = None,
        contexts: Sequence[MicrobatchContext] = (),
    ) -> None:
        self._functions: dict[tuple[bool, bool], StageFunction] = {(True, False): function}  # by Mode, which is dearer
        self._autocast = autocast
        self._variant = variant
        self._contexts = tuple(contexts)

    def run(self, call: StageCall, training: bool = True) -> dict[str, Tensor]:
        """The outputs by name."""
        microbatch_shard, values, state = call
        is_empty = not microbatch_shard.num_samples
        function = self._functions.get((training, is_empty)) or self._function(training, is_empty)
        for each in self._contexts:
            each.at(microbatch_shard)
        if self._autocast is None:
            outputs = self._outputs(function, microbatch_shard, values, state)
        else:
            tensors = (each for each in (*state, *values) if isinstance(each, Tensor))
            device = next((tensor.device.type for tensor in tensors), "cpu")
            with autocast(device, self._autocast):
                outputs = self._outputs(function, microbatch_shard, values, state)
        return dict(zip(function.outputs, outputs, strict=True))

    def run_without_gradients(self, call: StageCall, training: bool = True) -> dict[str, Tensor]:
        """The outputs by name; nothing else is kept."""
        with torch.no_grad():
            return self.run(call, training)

    def _outputs(
        self,
        function: StageFunction,
        microbatch_shard: MicrobatchShard,
        values: tuple[Tensor, ...],
        state: tuple[StageAttribute, ...],
    ) -> Sequence[Tensor]:
        if self.examiner is None or function.traced is None:
            return function.function(microbatch_shard.num_samples, *microbatch_shard.sizes, *values, *state)
        arguments = (microbatch_shard.num_samples, *microbatch_shard.sizes, *values, *state)
        return self.examiner.run(function.traced, function, microbatch_shard.microbatch, arguments)

    def _function(self, training: bool, is_empty: bool) -> StageFunction:
        variant = self._variant
        function = self._functions[True, False] if variant is None else variant(Mode(training, is_empty))
        self._functions[training, is_empty] = function
        return function


@dataclass(frozen=True, slots=True)
class StageCut:
    """One stage of a model.

    Attributes:
        layers: by name.
        outputs: values that other stages read, and the loss.
        watched: values that evaluation may be asked for.
        own: by name, the parameters and buffers of which this rank has but a part.
        device: to which what the stage uses is moved; None: it stays where it is.
        weighed: layers whose result is corrected for what the parts of a batch count for.
        passes: follows where passes are, for gradients or parameters in slices; None: they are whole.
        recomputed: spans of layers that are computed again in the backward.
    """

    model: CapturedModule
    layers: frozenset[str]
    outputs: tuple[str, ...]
    watched: tuple[str, ...] = ()
    own: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device | None = None
    weighed: tuple[Weighed, ...] = ()
    passes: ShardedPasses | None = None
    recomputed: Spans = ()

    def function(
        self, rule: NodeRule, *, training: bool = True, late: bool = False, span_recompute: SpanRecompute | None = None
    ) -> StageFunction:
        """The stage, with nodes replaced by ``rule``; ``late``: compiled when it is first called.

        Args:
            span_recompute: how spans run once more; None: there is no backward for which they would.
        """
        model = self.model
        maps = model.layer_of_node, model.node_of_value
        outputs = self.outputs if training else tuple(dict.fromkeys((*self.outputs, *self.watched)))
        by_node = {one.node: one for one in self.weighed}
        stage_function = cut_stage(
            model.graph_module,
            self.layers,
            *maps,
            outputs,
            weighing(rule if self.passes is None else self.passes.rule(rule), by_node),
            model.sizes,
            late=late,
            extra_inputs={node: one.factor for node, one in by_node.items()},
            enclose=span_recompute.enclosing(self.recomputed) if span_recompute and self.recomputed else None,
        )
        attributes = {name: self.own.get(name, tensor) for name, tensor in stage_function.attributes.items()}
        if self.device is not None:
            move(tensors_of(*attributes.values()), self.device)
        return replace(
            stage_function, attributes=attributes, idle=frozenset(attributes.keys() - model.graph.parameters.keys())
        )


class StageFunctions:
    """The functions of one stage on a rank; none of them keeps the model alive.

    Args:
        tell_of: how the ranks of the stage tell each other about a node, by its name; None: there is one rank.
        draws: the rule for layers that draw random numbers.
        halves: whether some backward comes in two halves.
        divided: how the ranks divide layers along any dims; None: they share out samples.
        sites: how they share out the sites of a sparse network as well.
        blocks: of a divided stage, layers that are run in blocks, which is in evaluation alone.
        contexts: of what is run, before each run.

    Attributes:
        current: where operators that can be halved leave their weight gradients.
        span_recompute: how spans of layers that are computed again run once more; None: there are none.
        training: for shares with rows.
    """

    def __init__(
        self,
        cut: StageCut,
        tell_of: Callable[[str], Tell] | None,
        draws: NodeRule,
        *,
        halves: bool = False,
        divided: spatial.DividedStage | None = None,
        sites: SharedSites | None = None,
        blocks: Sequence[Block] = (),
        contexts: Sequence[MicrobatchContext] = (),
    ) -> None:
        self.current = CurrentQueue()
        self.span_recompute: SpanRecompute | None = None
        if cut.recomputed:
            from runtime.stage.recomputed import SpanRecompute  # late: few stages compute spans again

            self.span_recompute = SpanRecompute(contexts, self.current)
        if divided is not None:
            self.training = cut.function(divided.rule(draws), span_recompute=self.span_recompute)
            evaluation = divided.rule(in_evaluation, training=False)
            evaluating = _attempt(cut, evaluation, False, self.span_recompute)
            if blocks and isinstance(evaluating, StageFunction):

                def part(layers: frozenset[str], outputs: tuple[str, ...]) -> StageFunction:
                    return replace(cut, layers=layers, outputs=outputs, watched=()).function(evaluation, late=True)

                names = [layer.name for layer in cut.model.graph.layers if layer.name in cut.layers]
                arguments = (part, self.training, evaluating.outputs, cut.model.graph, names, blocks, divided)
                in_blocks = (extra.stage_in_blocks(*arguments) for extra in extras(RuntimeExtra))
                evaluating = required(in_blocks, "runtime", "stages in blocks")
            self._others = {Mode(False, False): evaluating}
            return
        together: list[NodeRule] = []
        if tell_of is not None:
            from runtime.stage.batch_norm import synchronise  # late, as a rank alone has all rows
            from runtime.stage.without_rows import without_rows

            together.append(synchronise(tell_of))
        if sites is not None:
            together.append(sites.rule)
        halved = [partial(deferred, current=self.current)] if halves else []
        rules = {
            Mode(True, False): first_of([*together, draws, *halved]),
            Mode(False, False): first_of([in_evaluation, *together]),
        }
        if tell_of is not None:
            rules[Mode(True, True)] = without_rows(first_of([*together, draws]))
            rules[Mode(False, True)] = without_rows(rules[Mode(False, False)])
        self.training = cut.function(rules.pop(Mode()), span_recompute=self.span_recompute)
        self._others = {mode: _attempt(cut, rule, mode.training, self.span_recompute) for mode, rule in rules.items()}

    def variant(self, mode: Mode) -> StageFunction:
        """The function for ``mode``.

        Raises:
            UnsupportedModelError: what the stage computes in that mode is not known.
        """
        function = self._others[mode]
        if isinstance(function, UnsupportedModelError):
            raise function
        return function


def first_of(rules: Iterable[NodeRule]) -> NodeRule:
    """The rule that asks ``rules`` in turn."""
    asked = tuple(rules)

    def rule(node: fx.Node) -> Callable[..., Any] | None:
        return next((form for each in asked if (form := each(node)) is not None), None)

    return rule


def _attempt(
    cut: StageCut, rule: NodeRule, training: bool, span_recompute: SpanRecompute | None
) -> StageFunction | UnsupportedModelError:
    """A function that may never be asked for, or why there is none."""
    if cut.model.evaluation and not training:
        return cannot_evaluate(cut.model.evaluation)
    try:
        return cut.function(rule, training=training, late=True, span_recompute=span_recompute if training else None)
    except UnsupportedModelError as error:
        return error.with_traceback(None)  # whose frames hold the model
