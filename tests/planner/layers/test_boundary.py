"""What crosses between stages: every needed element once, nothing that is there already, and back the same way."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.ir.box import Box, Interval, volume
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.ir.program import Message
from planner.ir.schedule import Edge
from planner.layers.boundary import Boundaries
from planner.passes import validate
from tests.planner.factories import chain_decision
from tests.planner.random_programs import random_boundaries

SEEDS = range(60)
SAMPLES = (1, 3, 4)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(interval.start, interval.stop) for interval in box)


def shape_of(boundaries: Boundaries, value: str, samples: int) -> tuple[int, ...]:
    return boundaries.graph.values()[value].at(samples, boundaries.graph.samples).shape


def made(seed: int, own: bool) -> Boundaries:
    """Random stages; with ``own`` every layer of a group has a layout of its own, sometimes held by several ranks."""
    draw = random.Random(seed)
    found = random_boundaries(draw, spatial=True)
    layouts = {}
    for layer in found.graph.layers:
        parts = found.layout(layer.name).num_parts
        shares = cut_points(tuple(draw.randint(1, 3) for _ in range(parts)))
        choices = [{"sample": shares}, {"feature": shares}, {"replica": shares}]
        if parts == 4:
            choices.append({"sample": (0, 1, 2), "feature": (0, 1, 3)})
        layouts[layer.name] = Layout(draw.choice(choices) if parts > 1 else {})
    if not own:
        return found
    return Boundaries.of(found.graph, found.stage_of, found.layouts, found.ranks, layouts)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("samples", SAMPLES)
def test_every_needed_element_arrives_exactly_once_from_an_owner(seed: int, samples: int, own: bool) -> None:
    boundaries = made(seed, own)
    for edge in boundaries.edges():
        for value in edge.values:
            shape = shape_of(boundaries, value, samples)
            owned, needed = boundaries.owned(value, samples), boundaries.needed(value, edge.dst, samples)
            arrived = {rank: np.zeros(shape, int) for rank in needed}
            for message in boundaries.messages(edge, samples):
                for part in message.parts:
                    if part.value == value:
                        arrived[message.dst][slices(part.box)] += 1
                        assert all(
                            o.start <= i.start and i.stop <= o.stop
                            for o, i in zip(owned[message.src], part.box, strict=True)
                        )
                        assert part.num_bytes == 4 * volume(part.box) > 0
            for rank, box in needed.items():
                expected = np.zeros(shape, int)
                expected[slices(box)] = 1
                assert (arrived[rank] == expected).all()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_no_more_than_what_is_needed(seed: int, own: bool) -> None:
    boundaries = made(seed, own)
    for edge in boundaries.edges():
        messages = boundaries.messages(edge, 4)
        needed = sum(volume(box) for value in edge.values for box in boundaries.needed(value, edge.dst, 4).values())
        assert sum(message.forward_bytes for message in messages) == 4 * needed
        assert [(m.src, m.dst) for m in messages] == sorted({(m.src, m.dst) for m in messages})


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_go_back_as_the_adjoint(seed: int, own: bool) -> None:
    """<F x, y> = <x, F* y>, where F sends and F* sends back and adds."""
    rng = np.random.default_rng(seed)
    boundaries = made(seed, own)
    for edge in boundaries.edges():
        messages = boundaries.messages(edge, 4)
        for value in edge.values:
            shape = shape_of(boundaries, value, 4)
            x = {rank: rng.standard_normal(shape) for rank in boundaries.owned(value, 4)}
            y = {rank: rng.standard_normal(shape) for rank in boundaries.needed(value, edge.dst, 4)}
            forward, backward = ({rank: np.zeros(shape) for rank in ranks} for ranks in (y, x))
            for message in messages:
                for part in (part for part in message.parts if part.value == value):
                    forward[message.dst][slices(part.box)] += x[message.src][slices(part.box)]
                for part in (part for part in message.gradient_parts if part.value == value):
                    backward[message.src][slices(part.box)] += y[message.dst][slices(part.box)]
            ahead = sum(np.vdot(forward[rank], y[rank]) for rank in y)
            back = sum(np.vdot(x[rank], backward[rank]) for rank in x)
            assert ahead == pytest.approx(back, rel=1e-12)


def conv_boundaries(**attributes: tuple[int, ...]) -> Boundaries:
    """A pointwise stage on ranks 0, 1 and a convolution on ranks 2, 3, both cut along the width 8."""
    width = TensorSpec(("sample", "channel", "width"), (2, 3, 8), "float32")
    numbers = {"kernel": (3,), "stride": (1,), "padding": (1,), "dilation": (1,), "groups": 1, **attributes}
    layers = (
        Layer("relu", "pointwise", ("x",), (width,)),
        Layer("conv", "conv", ("relu",), (width,), (), numbers),
    )
    graph = Graph(2, {"x": width}, layers, {}, "conv")
    layout = Layout({"width": (0, 4, 8)})
    return Boundaries.of(graph, {"relu": 0, "conv": 1}, (layout, layout), ((0, 1), (2, 3)))


def test_a_convolution_asks_for_its_halo() -> None:
    boundaries = conv_boundaries()
    assert boundaries.needed("relu", 1, 2) == {
        2: (Interval(0, 2), Interval(0, 3), Interval(0, 5)),
        3: (Interval(0, 2), Interval(0, 3), Interval(3, 8)),
    }
    (edge,) = boundaries.edges()
    moved = {(m.src, m.dst): m.parts[0].box[2] for m in boundaries.messages(edge, 2)}
    assert moved == {
        (0, 2): Interval(0, 4),
        (0, 3): Interval(3, 4),
        (1, 2): Interval(4, 5),
        (1, 3): Interval(4, 8),
    }


@pytest.mark.parametrize("shares", [(1,), (1, 1)])
def test_rows_that_a_stride_skips_come_along_where_the_dim_is_not_cut(shares: tuple[int, ...]) -> None:
    boundaries = conv_boundaries(kernel=(1,), stride=(2,), padding=(0,))
    relu, conv = boundaries.graph.layers
    half = replace(conv, outputs=(TensorSpec(("sample", "channel", "width"), (2, 3, 4), "float32"),))
    graph = replace(boundaries.graph, layers=(relu, half))
    layouts = (Layout(), Layout({"sample": cut_points(shares)}))
    ranks = ((0,), tuple(range(1, 1 + len(shares))))
    found = Boundaries.of(graph, boundaries.stage_of, layouts, ranks).needed("relu", 1, 2)
    assert [box[1:] for box in found.values()] == [(Interval(0, 3), Interval(0, 8))] * len(shares)
    by_width = Boundaries.of(graph, boundaries.stage_of, boundaries.layouts, boundaries.ranks).needed("relu", 1, 2)
    assert [box[2] for box in by_width.values()] == [Interval(0, 3), Interval(4, 7)]


def test_layers_of_a_stage_may_each_be_cut_in_their_own_way() -> None:
    """The maker is cut along channels, held twice each; one reader along the width, one along samples."""
    boundaries = conv_boundaries()
    relu, conv = boundaries.graph.layers
    also = Layer("also", "pointwise", ("relu",), relu.outputs)
    graph = Graph(2, boundaries.graph.inputs, (relu, conv, also), {}, "conv")
    own = {
        "relu": Layout({"channel": (0, 2, 3), "replica": (0, 1, 2)}),
        "conv": Layout({"width": (0, 4, 8)}),
        "also": Layout({"sample": (0, 1, 2)}),
    }
    stage_of = {"relu": 0, "conv": 1, "also": 1}
    found = Boundaries.of(graph, stage_of, (Layout(), Layout()), ((0, 1, 2, 3), (4, 5)), own)
    assert found.owned("relu", 2) == {
        rank: (Interval(0, 2), channels, Interval(0, 8))
        for rank, channels in enumerate([Interval(0, 2), Interval(0, 2), Interval(2, 3), Interval(2, 3)])
    }
    # The hull of both readers is all there is: each rank gets all samples for its width, and all width for its sample.
    everything = (Interval(0, 2), Interval(0, 3), Interval(0, 8))
    assert found.needed("relu", 1, 2) == {4: everything, 5: everything}
    (edge,) = found.edges()
    assert {(m.src, m.dst): m.forward_bytes for m in found.messages(edge, 2)} == {
        (0, 4): 4 * 2 * 2 * 8,
        (2, 4): 4 * 2 * 1 * 8,
        (1, 5): 4 * 2 * 2 * 8,
        (3, 5): 4 * 2 * 1 * 8,
    }


def test_of_ranks_that_hold_the_same_the_reader_itself_is_asked() -> None:
    boundaries = conv_boundaries()
    own = {"relu": Layout({"replica": (0, 1, 2)})}
    same = Boundaries.of(boundaries.graph, boundaries.stage_of, boundaries.layouts, ((0, 1), (1, 0)), own)
    (edge,) = same.edges()
    assert [(m.src, m.dst) for m in same.messages(edge, 2)] == [(0, 0), (1, 1)]


def test_several_readers_share_one_message() -> None:
    """A pointwise reader needs [4, 8), a dilated convolution behind it [2, 8): one message with the hull."""
    boundaries = conv_boundaries(padding=(2,), dilation=(2,))
    relu, conv = boundaries.graph.layers
    also = Layer("also", "pointwise", ("relu",), relu.outputs)
    graph = Graph(2, boundaries.graph.inputs, (relu, also, conv), {}, "conv")
    both = Boundaries.of(graph, {"relu": 0, "also": 1, "conv": 1}, boundaries.layouts, boundaries.ranks)
    assert both.edges() == (Edge(0, 1, ("relu",)),)
    assert {rank: box[2] for rank, box in both.needed("relu", 1, 2).items()} == {2: Interval(0, 6), 3: Interval(2, 8)}


def test_a_rank_of_both_stages_keeps_its_own_part() -> None:
    boundaries = conv_boundaries()
    same = Boundaries.of(boundaries.graph, boundaries.stage_of, boundaries.layouts, ((0, 1), (0, 1)))
    (edge,) = same.edges()
    assert sum(m.forward_bytes for m in same.messages(edge, 2) if m.src != m.dst) == 2 * 4 * 2 * 3


def two_outputs() -> Boundaries:
    """An LSTM in stage 0; stage 1 reads its steps, stage 2 its last state and, over a skip, an integer mask."""
    steps = TensorSpec(("sample", "time", "feature"), (4, 5, 6), "float32")
    state = TensorSpec(("dim0", "sample", "feature"), (1, 4, 6), "float32")
    mask = TensorSpec(("sample", "time"), (4, 5), "int64")
    layers = (
        Layer("mask", "pointwise", ("x",), (mask,)),
        Layer("lstm", "lstm", ("x",), (steps, state)),
        Layer("middle", "pointwise", ("lstm",), (steps,)),
        Layer("last", "opaque", ("middle", "lstm:1", "mask"), (steps,)),
    )
    graph = Graph(4, {"x": mask}, layers, {}, "last")
    layouts = (Layout(), Layout({"sample": cut_points((3, 1))}), Layout())
    stage_of = {"mask": 0, "lstm": 0, "middle": 1, "last": 2}
    return Boundaries.of(graph, stage_of, layouts, ((0,), (1, 2), (3,)))


def test_edges_name_their_values_in_the_order_of_making_and_skip_stages() -> None:
    assert two_outputs().edges() == (
        Edge(0, 1, ("lstm",), gradient=True),
        Edge(0, 2, ("mask", "lstm:1"), gradient=True),
        Edge(1, 2, ("middle",), gradient=True),
    )


def test_integers_go_forward_and_not_back() -> None:
    boundaries = two_outputs()
    (message,) = boundaries.messages(boundaries.edges()[1], 4)
    assert [part.value for part in message.parts] == ["mask", "lstm:1"]
    assert [part.value for part in message.gradient_parts] == ["lstm:1"]
    assert (message.forward_bytes, message.backward_bytes) == (4 * 5 * 8 + 4 * 6 * 4, 4 * 6 * 4)


def test_an_edge_of_integers_alone_has_no_gradient() -> None:
    boundaries = two_outputs()
    alone = Boundaries.of(
        boundaries.graph, {"mask": 0, "lstm": 1, "middle": 1, "last": 1}, boundaries.layouts[:2], ((0,), (1, 2))
    )
    assert alone.edges() == (Edge(0, 1, ("mask",), gradient=False),)


@pytest.mark.parametrize(("samples", "rows"), [(4, (3, 1)), (8, (6, 2)), (1, (1, 0))])
def test_uneven_shares_of_another_micro_batch_get_their_own_rows(samples: int, rows: tuple[int, int]) -> None:
    boundaries = two_outputs()
    messages = boundaries.messages(boundaries.edges()[0], samples)
    expected = {rank: n * 5 * 6 * 4 for rank, n in zip((1, 2), rows, strict=True) if n}
    assert {m.dst: m.forward_bytes for m in messages} == expected


def test_a_plans_program_is_bound_to_its_messages_and_legal() -> None:
    profile = chain_profile(4, num_devices=3, skips=((0, 3),))
    decision = chain_decision(profile, (1, 3), (2, 1, 2))
    boundaries = Boundaries.of_decision(profile.graph, decision)
    program = boundaries.program(decision)
    validate(program)
    assert program.stages.edges == (Edge(0, 1, ("l0",)), Edge(0, 2, ("l0",)), Edge(1, 2, ("l2",)))
    sizes = [program.messages[0, 1, m] for m in range(3)]
    assert [message.forward_bytes for (message,) in sizes] == [2 * 4096, 4096, 2 * 4096]
    assert all(isinstance(message, Message) for (message,) in sizes)
