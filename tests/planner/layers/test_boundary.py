"""What crosses between stages: every needed element once, nothing that is there already, and back the same way."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.ir.box import Interval, volume
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.ir.program import Message
from planner.ir.schedule import Edge
from planner.layers.boundary import Boundaries
from planner.passes import validate
from tests.planner.factories import chain_decision
from tests.planner.layers.oracle import slices
from tests.planner.random_programs import random_boundaries
from tests.planner.sparse_networks import SparseNetwork, segmenter


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


@pytest.mark.cases(40)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("samples", [1, 3, 4])
def test_every_needed_element_arrives_exactly_once_from_an_owner(seed: int, samples: int, own: bool) -> None:
    """And its gradient goes back the same way."""
    boundaries = made(seed, own)
    for edge in boundaries.edges():
        messages = boundaries.messages(edge, samples)
        assert [(m.src, m.dst) for m in messages] == sorted({(m.src, m.dst) for m in messages})
        assert all(message.gradient_parts == message.parts for message in messages)
        for value in edge.values:
            shape = boundaries.graph.values()[value].at(samples, boundaries.graph.samples).shape
            owned = boundaries.owned(value, samples)
            needed = boundaries.needed(value, edge.dst, samples)
            arrived = {rank: np.zeros(shape, int) for rank in needed}
            for message, part in ((m, part) for m in messages for part in m.parts if part.value == value):
                arrived[message.dst][slices(part.box)] += 1
                assert all(
                    o.start <= i.start and i.stop <= o.stop for o, i in zip(owned[message.src], part.box, strict=True)
                )
                assert part.num_bytes == 4 * volume(part.box) > 0
            for rank, box in needed.items():
                expected = np.zeros(shape, int)
                expected[slices(box)] = 1
                assert (arrived[rank] == expected).all()


WIDTH = TensorSpec(("sample", "channel", "width"), (2, 3, 8), "float32")
HALVES = Layout({"width": (0, 4, 8)})


def conv_boundaries(
    layouts: tuple[Layout, Layout] = (HALVES, HALVES),
    ranks: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)),
    own: dict[str, Layout] | None = None,
    also: bool = False,
    width: int = 8,
    **attributes: tuple[int, ...],
) -> Boundaries:
    """A pointwise stage and a convolution, ``also`` with another reader; cut along the width 8 unless told."""
    numbers = {"kernel": (3,), "stride": (1,), "padding": (1,), "dilation": (1,), "groups": 1, **attributes}
    layers = (
        Layer("relu", "pointwise", ("x",), (WIDTH,)),
        Layer("conv", "conv", ("relu",), (replace(WIDTH, shape=(2, 3, width)),), (), numbers),
        Layer("also", "pointwise", ("relu",), (WIDTH,)),
    )
    graph = Graph(2, {"x": WIDTH}, layers[: 2 + also], {}, "conv")
    return Boundaries.of(graph, {"relu": 0, "conv": 1, "also": 1}, layouts, ranks, own or {})


def test_a_convolution_asks_for_its_halo() -> None:
    boundaries = conv_boundaries()
    assert [box[2] for box in boundaries.needed("relu", 1, 2).values()] == [Interval(0, 5), Interval(3, 8)]
    (edge,) = boundaries.edges()
    moved = {(m.src, m.dst): (m.parts[0].box[2].start, m.parts[0].box[2].stop) for m in boundaries.messages(edge, 2)}
    assert moved == {(0, 2): (0, 4), (0, 3): (3, 4), (1, 2): (4, 5), (1, 3): (4, 8)}
    same = conv_boundaries(ranks=((0, 1), (0, 1)))  # which keep their own parts
    assert sum(m.forward_bytes for m in same.messages(edge, 2) if m.src != m.dst) == 2 * 4 * 2 * 3


@pytest.mark.parametrize("shares", [(1,), (1, 1)])
def test_rows_that_a_stride_skips_come_along_where_the_dim_is_not_cut(shares: tuple[int, ...]) -> None:
    skips = {"width": 4, "kernel": (1,), "stride": (2,), "padding": (0,)}
    ranks = ((0,), tuple(range(1, 1 + len(shares))))
    found = conv_boundaries((Layout(), Layout({"sample": cut_points(shares)})), ranks, **skips).needed("relu", 1, 2)
    assert [box[1:] for box in found.values()] == [(Interval(0, 3), Interval(0, 8))] * len(shares)
    by_width = conv_boundaries(**skips).needed("relu", 1, 2)
    assert [box[2] for box in by_width.values()] == [Interval(0, 3), Interval(4, 7)]


def test_layers_of_a_stage_may_each_be_cut_in_their_own_way() -> None:
    """The maker is cut along channels, held twice each; one reader along the width, one along samples."""
    own = {
        "relu": Layout({"channel": (0, 2, 3), "replica": (0, 1, 2)}),
        "conv": HALVES,
        "also": Layout({"sample": (0, 1, 2)}),
    }
    found = conv_boundaries((Layout(), Layout()), ((0, 1, 2, 3), (4, 5)), own, also=True)
    channels = [Interval(0, 2), Interval(0, 2), Interval(2, 3), Interval(2, 3)]
    assert [box[1] for box in found.owned("relu", 2).values()] == channels
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
    same = conv_boundaries(ranks=((0, 1), (1, 0)), own={"relu": Layout({"replica": (0, 1, 2)})})
    (edge,) = same.edges()
    assert [(m.src, m.dst) for m in same.messages(edge, 2)] == [(0, 0), (1, 1)]


def test_several_readers_share_one_message() -> None:
    """A pointwise reader needs [4, 8), a dilated convolution beside it [2, 8): one message with the hull."""
    both = conv_boundaries(also=True, padding=(2,), dilation=(2,))
    assert both.edges() == (Edge(0, 1, ("relu",)),)
    assert [box[2] for box in both.needed("relu", 1, 2).values()] == [Interval(0, 6), Interval(2, 8)]


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


def test_edges_name_their_values_in_the_order_of_making_skip_stages_and_send_no_integers_back() -> None:
    boundaries = two_outputs()
    assert boundaries.edges() == (
        Edge(0, 1, ("lstm",), gradient=True),
        Edge(0, 2, ("mask", "lstm:1"), gradient=True),
        Edge(1, 2, ("middle",), gradient=True),
    )
    (message,) = boundaries.messages(boundaries.edges()[1], 4)
    assert [part.value for part in message.parts] == ["mask", "lstm:1"]
    assert [part.value for part in message.gradient_parts] == ["lstm:1"]
    assert (message.forward_bytes, message.backward_bytes) == (4 * 5 * 8 + 4 * 6 * 4, 4 * 6 * 4)
    two_stages = {"mask": 0, "lstm": 1, "middle": 1, "last": 1}
    alone = Boundaries.of(boundaries.graph, two_stages, boundaries.layouts[:2], ((0,), (1, 2)))
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
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    validate(program)
    assert program.stages.edges == (Edge(0, 1, ("l0",)), Edge(0, 2, ("l0",)), Edge(1, 2, ("l2",)))
    sizes = [program.messages[0, 1, m] for m in range(3)]
    assert [message.forward_bytes for (message,) in sizes] == [2 * 4096, 4096, 2 * 4096]
    assert all(isinstance(message, Message) for (message,) in sizes)


def over_sites(maker: dict[str, tuple[int, ...]], reader: dict[str, tuple[int, ...]], cut: int = 2) -> Boundaries:
    graph = segmenter(samples=2, sites=500)
    stage_of = {layer.name: int(index >= cut) for index, layer in enumerate(graph.layers)}
    return Boundaries.of(graph, stage_of, (Layout(maker), Layout(reader)), ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("sites", "owned", "needed"), [({}, [250, 750], [500, 500]), ({"sites": (0, 300, 1000)}, [300, 700], [800, 200])]
)
def test_at_a_boundary_over_sites_every_rank_needs_its_own_rows(sites, owned: list[int], needed: list[int]) -> None:
    """By the samples of its share, or by explicit cut points of a level, on both sides."""
    reader = {"sites": (0, 800, 1000)} if sites else {}
    found = over_sites({"sample": (0, 1, 4), **sites}, {"sample": (0, 1, 2), **reader})
    (edge,) = found.edges()
    (value,) = edge.values
    channels = Interval(0, 8)
    for boxes, sizes in ((found.owned(value, 2), owned), (found.needed(value, 1, 2), needed)):
        ends = [0, *accumulate(sizes)]
        assert [*boxes.values()] == [(Interval(a, b), channels) for a, b in pairwise(ends)]
    assert sum(m.forward_bytes for m in found.messages(edge, 2)) == 1000 * 32


def test_rows_of_a_rank_whose_part_of_the_reader_is_empty_are_still_its_own() -> None:
    """A coarser level may give a rank nothing, but others fetch its rows of the finer one from it."""
    net = SparseNetwork(2, 4)
    first = net.conv("features", 4)
    graph = net.graph(net.conv(first, 4, stride=2))
    layout = Layout({"sample": (0, 1, 2), "sites": (0, 4, 8), "sites_1": (0, 2, 2)})
    stage_of = {layer.name: int(index > 0) for index, layer in enumerate(graph.layers)}
    found = Boundaries.of(graph, stage_of, (layout, layout), ((0, 1), (2, 3)))
    assert [len(box[0]) for box in found.needed(first, 1, 2).values()] == [4, 4]


def test_stages_that_read_maps_prepare_them() -> None:
    assert [over_sites({}, {}, cut).prepares() for cut in (2, 5)] == [(0, 1), (0,)]
