from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopipe.extras.figures.graph_layout import BOX_HEIGHT, BOX_WIDTH, LANES_PER_COLUMN, NetworkDrawing, draw, edges_of


@st.composite
def networks(drawn: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    size = drawn(st.integers(1, 25))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] < pair[1])
    return size, drawn(st.lists(pairs, unique=True, max_size=40)) if size > 1 else []


@given(networks(), st.sampled_from([0.3, 1.0, 2.3, 100.0]))
def test_boxes_lie_apart_inside_the_picture_and_no_level_line_runs_through_one(
    network: tuple[int, list[tuple[int, int]]], aspect: float
) -> None:
    size, edges = network
    drawn = draw(size, edges, aspect)
    assert len(set(drawn.boxes)) == len(drawn.boxes) == size
    for number, (x, y) in enumerate(drawn.boxes):
        assert 0 <= x - BOX_WIDTH / 2 < x + BOX_WIDTH / 2 <= drawn.width
        assert 0 <= y - BOX_HEIGHT / 2 < y + BOX_HEIGHT / 2 <= drawn.height + 1e-9
        for other_x, other_y in drawn.boxes[:number]:
            assert abs(x - other_x) >= 1 - 1e-9 or abs(y - other_y) >= 1 - 1e-9
        for x0, y0, x1, y1 in drawn.lines:
            through = y0 == y1 == y and x0 < x < x1
            assert not through


@given(networks())
def test_every_edge_leads_from_its_maker_to_its_reader(network: tuple[int, list[tuple[int, int]]]) -> None:
    size, edges = network
    drawn = draw(size, edges, 100.0)  # in one row
    for src, dst in edges:
        reached = {(drawn.boxes[src][0] + BOX_WIDTH / 2, drawn.boxes[src][1])}
        for _ in drawn.lines:
            reached |= {(x1, y1) for x0, y0, x1, y1 in drawn.lines if (x0, y0) in reached}
        assert (drawn.boxes[dst][0] - BOX_WIDTH / 2, drawn.boxes[dst][1]) in reached


def test_a_residual_block_is_two_lanes_and_a_chain_is_one() -> None:
    block = draw(4, [(0, 1), (1, 2), (2, 3), (0, 3)], 100.0)
    assert [x for x, _ in block.boxes] == [0.5, 1.5, 2.5, 3.5]
    assert {y for _, y in draw(4, [(0, 1), (1, 2), (2, 3)], 100.0).boxes} == {0.5}
    assert block.height == 2.0


@pytest.mark.parametrize("aspect", [0.5, 1.0, 2.5])
def test_rows_are_as_long_as_the_shape_asks(aspect: float) -> None:
    drawn: NetworkDrawing = draw(300, [(n, n + 1) for n in range(299)], aspect)
    assert drawn.width * LANES_PER_COLUMN / drawn.height == pytest.approx(aspect, rel=0.25)


def test_what_is_no_layer_is_an_input() -> None:
    assert edges_of({"a": ["x"], "b": ["a", "a", "y"], "c": ["a", "b"]}) == [(0, 1), (0, 2), (1, 2)]
