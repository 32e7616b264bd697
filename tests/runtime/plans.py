"""Decisions made by hand, and their execution by threads, for the runtime's tests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from planner.ir.graph import Graph, Layer
from planner.ir.layout import Layout, cut_points
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action, Op, Pipeline, Schedule
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import schedule as schedule_named
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.engine import Engine, StepResult
from runtime.monitor.failure import blame
from runtime.numerics.compare import Tolerance, loss_differences, sketches, tensor_differences
from runtime.numerics.single_device import serial_step
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import Hub, InProcessTransport
from tests.captures import capture

Ranks = Sequence[tuple[int, ...]]


def decide(
    graph: Graph,
    cuts: Sequence[float | str],
    micro_batches: tuple[int, ...],
    ranks: Ranks | None = None,
    shares: Sequence[tuple[int, ...]] | None = None,
    schedule: str | Callable[[Pipeline], Schedule] = "1f1b",
    place: Callable[[Layer, int], Placement] | None = None,
    token_slices: tuple[int, ...] = (),
) -> Decision:
    """The lowered decision that cuts ``graph`` at ``cuts``.

    Args:
        cuts: as shares of the layers (0.5 is in the middle), or the name of the first layer of a stage.
        ranks: of each stage; stage ``s`` on rank ``s`` if not given.  shares: samples of each rank, by stage.
        place: how a layer of a stage is divided, instead.
        token_slices: tokens of each slice.
    """
    names = [layer.name for layer in graph.layers]
    places = [names.index(cut) if isinstance(cut, str) else round(cut * len(names)) for cut in cuts]
    bounds = (0, *places, len(names))
    groups = tuple(ranks) if ranks is not None else tuple((s,) for s in range(len(bounds) - 1))
    share_of = tuple(shares) if shares is not None else tuple((1,) * len(group) for group in groups)
    layouts = [Layout({"sample": cut_points(s)} if len(s) > 1 else {}) for s in share_of]
    stage_of = {name: s for s, (a, b) in enumerate(pairwise(bounds)) for name in names[a:b]}
    order = schedule_named(schedule) if isinstance(schedule, str) else schedule
    num_ranks = 1 + max(rank for group in groups for rank in group)
    made = Decision(
        schedule=schedule if isinstance(schedule, str) else "by hand",
        micro_batches=micro_batches,
        stages=tuple(Stage(group, tuple(f"n0/cpu{rank}" for rank in group)) for group in groups),
        layers={
            layer.name: place(layer, s) if place else Placement(s, layouts[s].cuts)
            for layer in graph.layers
            for s in [stage_of[layer.name]]
        },
        program=(),
        token_slices=token_slices,
    )
    boundaries = Boundaries.of_decision(graph, made)
    edges = boundaries.edges()
    stages = boundaries.stages(edges, made.sizes)
    program = lower(order(Pipeline(stages)), stages, groups, boundaries.routes(edges, made.sizes), num_ranks)
    validate(program)
    return replace(made, program=tuple(tuple(str(action) for action in row) for row in program.rows))


def folded(pipeline: Pipeline) -> Schedule:
    """All forwards, then all backwards; the first and the last stage are one position, those between have their own."""
    stages = pipeline.stages
    last = stages.num_stages - 1
    rows = [(0, last), *((s,) for s in range(1, last))]
    batches = range(stages.num_microbatches)
    return Schedule(
        tuple(
            (
                *(Action(s, Op.FORWARD, m) for s in row for m in batches),
                *(Action(s, Op.BACKWARD, m) for s in reversed(row) for m in batches),
            )
            for row in rows
        )
    )


def split_backward(pipeline: Pipeline) -> Schedule:
    """All forwards, then the backwards for the inputs, then those for the weights."""
    stages = pipeline.stages
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    rows = (
        tuple(Action(s, op, m) for op in ops for m in range(stages.num_microbatches)) for s in range(stages.num_stages)
    )
    return Schedule(tuple(rows))


@dataclass(frozen=True)
class Trained:
    """What some steps gave: of the ranks together, or of one device."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def model_of(factory: str, input_shape: tuple[int, ...], **arguments: object) -> LoadedModel:
    """A reference network in float64; numbers only, as JSON."""
    texts = {name: str(list(value) if isinstance(value, tuple) else value) for name, value in arguments.items()}
    return load_model(ModelSource(f"profiler.models.{factory}", texts, input_shape, "float64"))


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def batch_of(model: LoadedModel, rows: int, step: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The model's example, resized to ``rows``, other at each step."""
    index = (torch.arange(rows) + step) % model.samples
    generator = torch.Generator().manual_seed(step)

    def pick(tensor: Tensor, rows_of_sample: int) -> Tensor:
        rows_of = tensor.unflatten(0, (-1, rows_of_sample or 1))[index].flatten(0, 1)
        return (
            rows_of + torch.randn(rows_of.shape, generator=generator, dtype=rows_of.dtype) * 0.1
            if (rows_of.is_floating_point())
            else rows_of
        )

    inputs, targets = model.fed
    picked = tuple(map(pick, (*inputs, *targets), model.fed_rows))
    return picked[: len(inputs)], picked[len(inputs) :]


def train_serially(model: LoadedModel, micro_batches: tuple[int, ...], steps: int = 3) -> Trained:
    """One device, on a copy of the user's module."""
    twin = copy.deepcopy(model)
    optimizer = sgd(twin.module.parameters())
    losses = [
        serial_step(twin.loss, optimizer, *batch_of(model, sum(micro_batches), step), micro_batches)
        for step in range(steps)
    ]
    gradients = {name: p.grad for name, p in twin.module.named_parameters()}
    return Trained(losses, gradients, twin.module.state_dict())


def train_by_plan(model: LoadedModel, decision: Decision, steps: int = 3, **options: object) -> Trained:
    """All ranks as threads; what they share must be the same on each of them."""
    batches = [batch_of(model, decision.global_batch, step) for step in range(steps)]
    of_rank: dict[int, dict[str, Tensor]] = {}
    states: dict[int, dict[str, Tensor]] = {}
    engines, results = run_ranks(model, decision, batches, gradients=of_rank, states=states, **options)
    gradients: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for rank in range(len(engines)):
        for found, more in ((gradients, of_rank[rank]), (state, states[rank])):
            for name, tensor in more.items():
                assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    losses = [{result[step].loss for result in results if result[step].loss is not None} for step in range(steps)]
    assert all(len(each) == 1 for each in losses)
    return Trained([each.pop() for each in losses], gradients, state)


def run_ranks(
    model: LoadedModel,
    decision: Decision,
    batches: Sequence[tuple[tuple[Tensor, ...], ...]],
    *,
    transport: type[InProcessTransport] = InProcessTransport,
    only: tuple[int, ...] = (),
    errors: list[BaseException] | None = None,
    gradients: dict[int, dict[str, Tensor]] | None = None,
    states: dict[int, dict[str, Tensor]] | None = None,
    **options: object,
) -> tuple[list[Engine], list[list[StepResult]]]:
    """Every rank in a thread, on a copy of the model of its own.

    Args:
        only: the ranks that take part; all if empty.
        gradients: gets those of the last step, by rank.
        states: gets what each rank has of the model's state in the end.
        errors: gets the errors of all ranks; the one to blame for the others is raised.
    """
    num_ranks = decision.num_ranks
    ranks = only or tuple(range(num_ranks))
    original = model, capture(model)
    hub = Hub(num_ranks, groups_of(decision, original[1].graph), rendezvous=True)
    copies = [copy.deepcopy(original) for _ in ranks]  # together: they share parameters
    engines: dict[int, Engine] = {}
    results: dict[int, list[StepResult]] = {rank: [] for rank in ranks}
    found = [] if errors is None else errors

    def run(rank: int, twin: LoadedModel, captured: CapturedModule) -> None:
        end = transport(hub, rank)
        try:
            engines[rank] = engine_of(decision, twin, captured, end, **options)
            for inputs, targets in batches:
                results[rank].append(engines[rank].step(inputs, targets))
            engines[rank].settle()
            if gradients is not None:  # all ranks together: some may have slices
                gradients[rank] = engines[rank].gradients()
            if states is not None:
                states[rank] = engines[rank].state_dict()
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            found.append(error)
        finally:
            end.close()

    threads = [threading.Thread(target=run, args=(rank, *each)) for rank, each in zip(ranks, copies, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if found:
        found.sort(key=blame)
        raise found[0]
    return [engines[rank] for rank in ranks], [results[rank] for rank in ranks]


def engine_of(
    decision: Decision, model: LoadedModel, captured: CapturedModule, transport: object, **options: object
) -> Engine:
    """The engine of one rank."""
    told = {"deadline_s": 20.0, "model": captured, "module": model.module, "transport": transport, **options}
    return Engine(RankContext(decision, told.pop("optimizer", sgd), **told))


def assert_equal(found: Trained, expected: Trained, tolerance: float = 1e-10) -> None:
    """Losses, gradients and state are those of one device."""
    assert len(found.losses) == len(expected.losses)
    limits = Tolerance(tolerance, tolerance, 1e-12)
    differences = loss_differences(found.losses, expected.losses, limits)
    for kind in ("gradients", "state"):
        here = getattr(found, kind)
        there = getattr(expected, kind)
        assert sorted(here) == sorted(there)
        differences += tensor_differences(kind, sketches(here), sketches(there), limits)
    wrong = [str(each) for each in differences if not each.error <= tolerance]
    if wrong:
        raise AssertionError("\n".join(wrong))
