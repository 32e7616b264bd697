"""A rank's stages timed alone: forward and backward of one share of a micro-batch, and nobody is waited for.

What the machine does to computing is seen so, apart from messages, from waiting and from what is wrong with a model of
them.  The layers are those of the stage, undivided, on as many samples as the rank has of a micro-batch; where ranks
divide layers along other dims, on its part of the samples.  Halos, shared statistics and sums of gradients are left
out: the profile prices layers the same way.

Nothing that trains is touched.  Parameters are leaves of their own that share storage with those of the stage and are
never written; buffers that layers write are copies; random numbers are drawn by a stream of its own, and torch's
generators are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from cuda_ops.device import driver
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import SAMPLE, TensorSpec, producer
from runtime.captured import CapturedModule
from runtime.pipeline.routing import CPU, dtype_of
from runtime.rank import RankContext
from runtime.spatial.parameters import parts_of
from runtime.stage.cut import StageFunction
from runtime.stage.functions import StageCut, StageFunctions
from runtime.stage.modes import MicrobatchShard, RunConfig
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.stage.stage import StagePasses


@dataclass(frozen=True, slots=True)
class LoneStage:
    """A stage of this rank that can be run without its peers.

    Attributes:
        number: of the stage.
        share: what it is run on.
        function: of a stage of one rank.
        passes_of: runs such a function.
        values: its inputs.
        gradients: of its outputs, but the loss; None where the plan does not train.
    """

    number: int
    share: MicrobatchShard
    function: StageFunction
    passes_of: Callable[[StageFunction], StagePasses]
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor] | None

    def pass_s(self) -> float:
        """Seconds of one forward and, where the plan trains, backward."""
        device = next((tensor.device for tensor in self.function.tensors.values()), CPU)
        with driver.kept_generators(device):
            passes = self.passes_of(_apart(self.function))
            start = _now(device)
            passes.forward(self.share, self.values, 1.0)
            if self.gradients is not None:
                passes.backward(0, self.gradients)
            return _now(device) - start


def lone_stages(
    context: RankContext, model: CapturedModule, example: Mapping[str, Tensor]
) -> tuple[tuple[LoneStage, ...], str]:
    """The stages of a rank that can be run alone, and why others cannot.

    Args:
        model: its parameters are those that are trained.
        example: the graph's inputs, of the samples that it was captured with.
    """
    stages: list[LoneStage] = []
    for stage in context.stages:
        samples = _samples(context, stage)
        if reason := _hindrance(context, model, stage, samples):
            return (), f"stage {stage} is not timed alone: {reason}"
        try:
            if samples:
                stages.append(_lone_stage(context, model, stage, samples, example))
        except UnsupportedModelError as error:  # of one rank with other samples; the run does without
            return (), f"stage {stage} is not timed alone: {error.title}"
    return tuple(stages), ""


def _hindrance(context: RankContext, model: CapturedModule, stage: int, samples: int) -> str:
    if context.preparation is not None:
        return "what clouds take differs from batch to batch"
    if samples and samples != context.graph.samples and not context.takes_any:
        return f"the model was captured for {context.graph.samples} samples only"
    each = context.decision.stages[stage]
    if each.level > 2 and len(each.ranks) > 1:
        return "its ranks have its parameters in slices"
    if stage in context.divided:
        parts = parts_of(model, context.decision, stage, context.rank).values()
        return "" if all(part.is_whole for part in parts) else "its ranks have parts of its parameters"
    return ""


def _samples(context: RankContext, stage: int) -> int:
    """Of the largest micro-batch, what the rank has of it."""
    decision = context.decision
    rows = max(decision.micro_batches)
    if stage in context.divided:
        return -(-rows // len(decision.stages[stage].ranks))
    return decision.layout_of(stage).samples(rows)[context.position(stage)]


def _lone_stage(
    context: RankContext, model: CapturedModule, stage: int, samples: int, example: Mapping[str, Tensor]
) -> LoneStage:
    graph = context.graph
    trains = context.program.trains
    of_stage = context.decision.stages[stage]
    rng = CounterRng(0)
    noise = torch.Generator().manual_seed(0)
    functions = _functions(context, model, stage, rng)
    function = functions.training
    specs = graph.values()
    values = {
        name: _repeated(example[name], graph.inputs[name], samples, graph.samples)
        if name in graph.inputs
        else _made_up(specs[name].at(samples, graph.samples), noise)
        for name in function.inputs
    }
    handed_on = [name for name in function.outputs if name != graph.loss and specs[name].is_float]
    gradients = {name: _made_up(specs[name].at(samples, graph.samples), noise) for name in handed_on}
    where = context.device or CPU
    run_config = RunConfig(trains, of_stage.recompute and trains, autocast=model.autocast)
    sizes = tuple(example[source].shape[dim] for source, dim in (model.sizes[name] for name in function.sizes))
    runs = partial(
        StagePasses,
        received=frozenset(name for name in function.inputs if name not in graph.inputs),
        loss=graph.loss if graph.loss in function.outputs else None,
        run_config=run_config,
        current=functions.current,
        variant=functions.variant,
        rng=rng,
        span_recompute=functions.span_recompute,
    )
    return LoneStage(
        stage,
        MicrobatchShard(0, samples, 0, samples, sizes),
        function,
        runs,
        {name: value.to(where) for name, value in values.items()},
        {name: value.to(where) for name, value in gradients.items()} if trains else None,
    )


def _functions(context: RankContext, model: CapturedModule, stage: int, rng: CounterRng) -> StageFunctions:
    """Those of a stage of one rank."""
    graph = context.graph
    layers = frozenset(context.decision.layers_of(stage))
    outputs = dict.fromkeys(value for edge in context.program.stages.out_of(stage) for value in edge.values)
    if producer(graph.loss) in layers:
        outputs[graph.loss] = None
    recomputed = context.decision.stages[stage].recomputed
    cut = StageCut(model, layers, tuple(outputs), device=context.device, recomputed=recomputed)
    return StageFunctions(cut, None, RandomNodes(model).rule(rng), contexts=[rng])


def _apart(function: StageFunction) -> StageFunction:
    """The same function on leaves that share storage with its parameters, and copies of the buffers that it writes."""

    def own(name: str, tensor: Tensor) -> Tensor:
        plain = tensor.detach().clone() if name in function.mutated else tensor.detach()
        return nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain

    own_tensors = {name: own(name, tensor) for name, tensor in function.tensors.items()}
    return replace(function, attributes={**function.attributes, **own_tensors})


def _repeated(tensor: Tensor, spec: TensorSpec, samples: int, captured: int) -> Tensor:
    """The first ``samples`` of an input of the capture, from the start again where it has fewer."""
    if SAMPLE not in spec.dims:
        return tensor
    dim = spec.dims.index(SAMPLE)
    times = -(-samples // captured)
    return torch.cat([tensor] * times, dim).narrow(dim, 0, tensor.shape[dim] // captured * samples).contiguous()


def _made_up(spec: TensorSpec, noise: torch.Generator) -> Tensor:
    """What another stage would make: noise, and zeros where it would be no numbers."""
    dtype = dtype_of(spec)
    if not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype)
    return torch.randn(spec.shape, generator=noise).to(dtype)


def _now(device: torch.device) -> float:
    driver.synchronize(device)
    return perf_counter()
