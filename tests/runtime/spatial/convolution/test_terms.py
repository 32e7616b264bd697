from __future__ import annotations

from planner.ir.box import Box, Interval
from runtime.spatial.convolution.gathered import segments
from runtime.spatial.convolution.terms import ConvWindow, main_term, piece_term


def rows(*part: int) -> Box:
    return (Interval(0, 1), Interval(0, 4), Interval(*part))


def line(kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, transposed: bool = False) -> ConvWindow:
    return ConvWindow((kernel,), (stride,), (padding,), (dilation,), 1, transposed)


def test_the_picture_of_the_module():
    """Four rows held, one comes from below: it touches one tap, and one output sees it."""
    window = line(3, padding=1)
    main = main_term(window, rows(0, 4), rows(0, 4))
    piece = piece_term(window, rows(4, 5), rows(0, 4))
    assert main.is_whole
    assert main.options[1] == (1,)
    assert (piece.taps, piece.place, piece.pad) == (((2, 2, 1),), ((2, 3, 1),), ())
    assert piece.multiplications == 1
    assert main.multiplications == 4 * 3


def test_zeros_only_on_one_side_are_cut_off_the_result():
    main = main_term(line(2), rows(0, 4), rows(0, 4))  # output 3 reads rows 3 and 4
    assert main.options[1] == (1,)
    assert main.rows == ((2, 1, 4),)
    assert main.rows_pad == (1, 0)


def test_rows_that_nobody_reads_are_skipped():
    main = main_term(line(1, stride=3), rows(1, 10), rows(1, 4))  # reads rows 3, 6, 9
    assert main.source == ((2, 2, 7),)
    assert main.source_pad == (2, 0)
    assert piece_term(line(1, stride=3), rows(4, 6), rows(0, 4)) is None


def test_dilation_passes_over_rows():
    assert piece_term(line(2, dilation=3), rows(5, 6), rows(0, 2)) is None  # outputs 0 and 1 read rows 0, 3, 1, 4
    piece = piece_term(line(2, dilation=3), rows(4, 6), rows(0, 2))
    assert piece.place == ((2, 1, 1),)
    assert piece.taps == ((2, 1, 1),)


def test_a_transposed_convolution_reaches_all_or_some_outputs():
    window = line(4, stride=2, padding=1, transposed=True)
    main = main_term(window, rows(2, 4), rows(4, 8))  # of outputs 3 to 8
    assert main.is_whole
    assert main.options[1] == (1,)
    piece = piece_term(window, rows(4, 5), rows(4, 8))  # reaches output 7 by its first tap
    assert (piece.taps, piece.place) == (((2, 0, 1),), ((2, 3, 1),))
    padded = main_term(line(1, stride=3, transposed=True), rows(0, 2), rows(0, 6))  # outputs 0 and 3
    assert padded.is_whole  # the zeros behind are the operator's own
    assert padded.options[4] == (2,)
    alone = main_term(line(1, stride=3, transposed=True), rows(0, 2), rows(0, 8))
    assert alone.place == ((2, 0, 4),)


def test_a_cut_through_groups_makes_calls_of_whole_groups_and_parts():
    window = ConvWindow((3,), (1,), (1,), (1,), groups=3)
    found = segments(window, Interval(2, 9), Interval(0, 6), (6, 12))  # 3 groups of 2 channels and 4 filters
    assert [(each.groups, each.outputs) for each in found] == [
        (1, Interval(2, 4)),
        (1, Interval(4, 8)),
        (1, Interval(8, 9)),
    ]
    assert [each.source for each in found] == [((1, 0, 2),), ((1, 2, 2),), ((1, 4, 2),)]
    assert [each.weight for each in found] == [((0, 0, 2),), ((0, 2, 4),), ((0, 6, 1),)]
    whole = segments(window, Interval(4, 12), Interval(2, 6), (6, 12))
    assert len(whole) == 1
    assert whole[0].groups == 2
    assert whole[0].is_whole
