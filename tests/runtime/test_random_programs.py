"""Random legal programs, run by threads on stages of trivial arithmetic, compute what one device computes.

HALOPIPE_RANDOM_PROGRAMS=10000 runs so many.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from planner.ir.layout import Layout, cut_points
from planner.ir.program import Program
from planner.ir.schedule import Action, Op, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import validate
from tests.planner.random_programs import random_graph
from tests.runtime.arithmetic import WITH_MEAN, Outcome, computed_alone, random_batch, random_weights
from tests.runtime.arithmetic_ranks import Options, computed_by_ranks
from tests.runtime.random_orders import in_double, random_case

COUNT = int(os.environ.get("HALOPIPE_RANDOM_PROGRAMS", "240"))
BLOCKS = 8
TOLERANCE = 1e-10


def random_options(rng: random.Random, program: Program) -> Options:
    num_stages = program.stages.num_stages
    is_versioned = any(a.op is Op.UPDATE and a.microbatch is not None for row in program.rows for a in row)
    sharded = () if is_versioned or rng.random() < 0.7 else rng.sample(range(num_stages), rng.randint(0, num_stages))
    again = () if rng.random() < 0.7 else rng.sample(range(num_stages), rng.randint(0, num_stages))
    lookahead = 0 if program.blocking else rng.choice((0, 1, 2))  # what blocks was proved with the runtime's own
    return Options(rng.random() < 0.5, lookahead, frozenset(sharded), frozenset(again), rng.choice((1, 1, 1, 2)))


def differences(boundaries: Boundaries, expected: Outcome, found: list[Outcome]) -> list[str]:
    wrong = []
    for step, loss in enumerate(expected.losses):
        there = sum(outcome.losses[step] for outcome in found)
        if not abs(there - loss) <= TOLERANCE * max(1, abs(loss)):
            wrong.append(f"loss of step {step}: {there}, expected {loss}")
    for rank, outcome in enumerate(found):
        here = {name for name in expected.weights if rank in boundaries.ranks[boundaries.stage_of[name]]}
        assert here == set(outcome.weights)
        wrong += [
            f"rank {rank}: {name} is {error:.2e} off"
            for name, weight in outcome.weights.items()
            if not (error := (weight - expected.weights[name]).abs().max().item()) <= TOLERANCE
        ]
    return wrong


def check(seed: int, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    boundaries, micro_batches, program = random_case(rng)
    options = random_options(rng, program)
    start = random_weights(boundaries, seed)
    batch = random_batch(micro_batches, seed)
    expected = computed_alone(boundaries, program, batch, start, options.steps)
    try:
        wrong = differences(boundaries, expected, computed_by_ranks(boundaries, program, batch, start, options))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{told(program, options)}") from error
    assert not wrong, f"seed {seed}: {wrong}\n{told(program, options)}"
    count(seen, boundaries, program, options)


def told(program: Program, options: Options) -> str:
    rows = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(program.rows))
    return f"{options}\n{program.ranks}\n{rows}"


def count(seen: Counter[str], boundaries: Boundaries, program: Program, options: Options) -> None:
    actions = [action for row in program.rows for action in row]
    groups = [set(group) for group in program.ranks]
    seen += Counter(
        {
            "blocking": program.blocking,
            "older weights": any(action.version for action in actions),
            "split backward": any(action.op is Op.BACKWARD_WEIGHT for action in actions),
            "sums inside replicated stages": any(
                layer.kind == WITH_MEAN and len(program.ranks[boundaries.stage_of[layer.name]]) > 1
                for layer in boundaries.graph.layers
            ),
            "replicas": any(len(group) > 1 for group in groups),
            "groups that overlap": any(a & b and a != b for a in groups for b in groups),
            "several stages on a rank": any(a & b for i, a in enumerate(groups) for b in groups[:i]),
            "skip over stages": any(edge.dst - edge.src > 1 for edge in program.stages.edges),
            "forward only": not program.trains,
            "divided optimiser": bool(options.sharded),
            "recompute": bool(options.recompute),
            "rendezvous": options.rendezvous,
            "joined messages": bool(program.joined()),
        }
    )


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_legal_programs_compute_what_one_device_computes(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, COUNT, BLOCKS):
        check(seed, seen)
    assert len(seen) >= 9, "hardly anything is tried"


def test_sums_of_two_stages_on_the_same_ranks_start_in_one_order() -> None:
    """The last gradients come in another order on each rank, the reductions do not."""
    graph = in_double(random_graph(random.Random(0), 4))
    stage_of = {layer.name: int(index > 1) for index, layer in enumerate(graph.layers)}
    layouts = [Layout({"sample": cut_points((1, 1))})] * 2
    ranks = ((0, 1),) * 2
    boundaries = Boundaries.of(graph, stage_of, layouts, ranks)
    stages = StageGraph(2, 1, boundaries.edges())
    rows = [f"0F0 1F0 1I0 0I0 {a}W0 {b}W0 0REDUCE_GRAD 1REDUCE_GRAD 0UPDATE 1UPDATE" for a, b in ((0, 1), (1, 0))]
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    program = Program(actions, stages, ranks, boundaries.routes(stages.edges, (4,)))
    validate(program)
    start = random_weights(boundaries, 0)
    batch = random_batch((4,), 0)
    found = computed_by_ranks(boundaries, program, batch, start, Options())
    assert differences(boundaries, computed_alone(boundaries, program, batch, start), found) == []
