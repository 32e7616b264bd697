"""The ranks, as threads, of programs on networks of trivial arithmetic.

Mailbox, routing, executor, stages, reductions and optimisers are the runtime's own; only the captured graph is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx

from cuda_ops.dense.deferred_gradients import CurrentQueue, deferred
from planner.ir.graph import Layer
from planner.ir.plan import Decision, Stage
from planner.ir.program import Program
from planner.layers.boundary import Boundaries
from planner.passes.versions import updates_of
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.optim.of_stage import Updates
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import ShardedParameters
from runtime.pipeline.executor import Executor
from runtime.pipeline.routing import Routing
from runtime.pipeline.specialize import Specialization
from runtime.rank import RankContext
from runtime.stage.cut import StageFunction
from runtime.stage.local_stage import LocalStage
from runtime.stage.modes import MicrobatchShard, RunConfig
from runtime.stage.stage import StagePasses
from runtime.transport import Hub, InProcessTransport
from tests.runtime.arithmetic import RATE, MicroBatch, Outcome, Weights, run_layers

DEADLINE_S = 60.0
LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class Options:
    """How a program is run; none of it may change what comes out.

    Attributes:
        rendezvous: see :class:`runtime.transport.inprocess.Hub`.
        lookahead: see :class:`runtime.rank.RankContext`.
        sharded: stages whose ranks divide their optimiser.
        recompute: stages that run their forward again.
        steps: one after another, on the same batch.
    """

    rendezvous: bool = False
    lookahead: int = 0
    sharded: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()
    steps: int = 1


def computed_by_ranks(
    boundaries: Boundaries, program: Program, batch: Sequence[MicroBatch], start: Weights, options: Options
) -> list[Outcome]:
    """Every rank in a thread; losses are given by the ranks that make them, each its part of them.

    Raises:
        BaseException: the first error of any rank.
    """
    groups = {group for group in boundaries.ranks if len(group) > 1}
    hub = Hub(len(program.rows), groups, rendezvous=options.rendezvous)
    outcomes: dict[int, Outcome] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = InProcessTransport(hub, rank)
        try:
            outcomes[rank] = _Rank(boundaries, program, start, options, transport).run(batch)
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)
        finally:
            transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(program.rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if hub.mailboxes or hub.parcels:
        raise AssertionError(f"left in the hub: {list(hub.mailboxes)}, {list(hub.parcels)}")
    return [outcomes[rank] for rank in range(len(program.rows))]


class _Rank:
    def __init__(
        self,
        boundaries: Boundaries,
        program: Program,
        start: Weights,
        options: Options,
        transport: InProcessTransport,
    ) -> None:
        self.boundaries = boundaries
        self.program = program
        self.start = start
        self.options = options
        self.transport = transport
        self.rank = transport.rank

    def run(self, batch: Sequence[MicroBatch]) -> Outcome:
        boundaries = self.boundaries
        program = self.program
        rows = tuple(len(each["y"]) for each in batch)
        local_stages = {s: self._local_stage(s, rows) for s, ranks in enumerate(boundaries.ranks) if self.rank in ranks}
        routing = Routing([boundaries] * len(rows), program, rows, self.rank)
        stages = tuple(Stage(ranks, ("a thread",) * len(ranks)) for ranks in boundaries.ranks)
        decision = Decision("by hand", rows, stages, {}, ())
        told = {"deadline_s": DEADLINE_S, "lookahead": self.options.lookahead, "transport": self.transport}
        context = RankContext(decision, torch.optim.SGD, **told)
        context.program = program
        executor = Executor(Specialization(rows, program, routing, local_stages), context)
        losses = []
        for step in range(self.options.steps):
            executor.begin(step, step, batch)
            executor.run()
            assert executor.num_left == 0
            assert self.transport.num_buffers() == (0, 0)
            assert not any(local_stage.passes.num_in_flight for local_stage in local_stages.values())
            losses.append(sum(local_stage.loss() for local_stage in local_stages.values()) / sum(rows))
        weights = {
            name: parameter.detach()
            for local_stage in local_stages.values()
            for name, parameter in local_stage.parameters.items()
        }
        return Outcome(tuple(losses), weights)

    def _local_stage(self, stage: int, rows: tuple[int, ...]) -> LocalStage:
        boundaries = self.boundaries
        graph = self.boundaries.graph
        ranks = self.boundaries.ranks[stage]
        mine = [layer for layer in graph.layers if boundaries.stage_of[layer.name] == stage]
        made = {layer.name for layer in mine}
        read = dict.fromkeys(value for layer in mine for value in layer.inputs if value not in made)
        sent = dict.fromkeys(value for edge in self.program.stages.out_of(stage) for value in edge.values)
        outputs = tuple(sent | dict.fromkeys(made & {graph.loss}))
        current = CurrentQueue()
        parameters = {name: nn.Parameter(self.start[name].clone()) for name in self.start if name in made}
        function = StageFunction(
            _function(mine, tuple(read), outputs, tuple(parameters), current, self._mean(ranks)),
            tuple(read),
            outputs,
            parameters,
            frozenset(),
        )
        received = tuple(value for value in read if value not in graph.inputs)
        updates = self._updates(stage, parameters)
        actions = [action for action in self.program.rows[self.rank] if action.stage == stage]
        passes = StagePasses(
            function,
            frozenset(received),
            graph.loss if graph.loss in outputs else None,
            RunConfig.of(actions, stage in self.options.recompute, None),
            current=current,
            added=None if updates.reduction is None else updates.reduction.note,
        )
        shares = []
        feeds = []
        for m, weight in enumerate(self._weights(rows)):
            counts = boundaries.layouts[stage].samples(rows[m])
            position = ranks.index(self.rank)
            first = sum(counts[:position])
            count = counts[position]
            shares.append(MicrobatchShard(m, count, first, rows[m], loss_weight=weight * count))
            own = slice(first, first + count)
            feeds.append({name: partial(_fed, m=m, name=name, own=own) for name in read if name in graph.inputs})
        add = partial(self.transport.all_reduce, ranks=ranks)
        handed_on = tuple(name for name in outputs if name != graph.loss)
        return LocalStage(passes, ranks, tuple(shares), received, handed_on, tuple(feeds), parameters, {}, updates, add)

    def _mean(self, ranks: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        add = partial(self.transport.all_reduce, ranks=ranks)
        return partial(_Mean.apply, add if len(ranks) > 1 else _nothing)

    def _updates(self, stage: int, parameters: dict[str, nn.Parameter]) -> Updates:
        ranks = self.boundaries.ranks[stage]
        transport = self.transport
        shards = None
        reduction: GradientBuckets | ShardedParameters | None = None
        if len(ranks) > 1 and stage in self.options.sharded:
            together = (partial(each, ranks=ranks) for each in (transport.reduce_scatter, transport.all_gather))
            reduction = shards = ShardedParameters(parameters, ranks.index(self.rank), len(ranks), *together)
        elif len(ranks) > 1:  # each parameter is a bucket
            reduction = GradientBuckets(parameters.values(), partial(transport.start_sum, ranks=ranks), bucket_bytes=1)
        sgd = partial(torch.optim.SGD, lr=RATE)
        optimizer = StageOptimizer(parameters, sgd, shards) if parameters else None
        return Updates(frozenset(), reduction, optimizer, frozenset())

    def _weights(self, rows: tuple[int, ...]) -> list[float]:
        found = []
        first = 0
        for end in updates_of(self.program):
            last = len(rows) - 1 if end is None else end
            found += [1 / sum(rows[first : last + 1])] * (last + 1 - first)
            first = last + 1
        return found


def _fed(batch: Sequence[MicroBatch], m: int, name: str, own: slice) -> Tensor:
    return batch[m][name][own]


def _function(
    layers: Sequence[Layer],
    read: tuple[str, ...],
    outputs: tuple[str, ...],
    weights: tuple[str, ...],
    current: CurrentQueue,
    mean: Callable[[Tensor], Tensor],
) -> Callable[..., tuple[Tensor, ...]]:
    linear = _deferred_linear(current)

    def run(num_samples: int, *given: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(read, given[: len(read)], strict=True))
        assert all(len(value) == num_samples for value in values.values())
        run_layers(layers, values, dict(zip(weights, given[len(read) :], strict=True)), linear, mean)
        return tuple(values[name] for name in outputs)

    return run


def _deferred_linear(current: CurrentQueue) -> Callable[[Tensor, Tensor], Tensor]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(LINEAR, (x, graph.create_node("get_attr", "weight")))
    return deferred(node, current)


class _Mean(torch.autograd.Function):
    """The mean over the samples that the ranks of a stage have together, as a row; its adjoint sums over them too."""

    @staticmethod
    def forward(ctx: FunctionCtx, add: Callable[[Tensor], None], x: Tensor) -> Tensor:
        total = torch.cat((x.sum(0), torch.tensor([len(x)], dtype=x.dtype)))
        add(total)
        ctx.add = add
        ctx.count = total[-1]
        ctx.share = len(x)
        return (total[:-1] / total[-1]).unsqueeze(0)

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[None, Tensor]:
        total = dy.clone()
        ctx.add(total)
        return None, (total / ctx.count).expand(ctx.share, -1)


def _nothing(tensor: Tensor) -> None:
    """There is one rank."""
