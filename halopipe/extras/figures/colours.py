"""Colours of figures and pages, Okabe and Ito's (2008), and what operations are called; loads no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping

from halopipe.terminal import tables
from planner.ir.schedule import Op

ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, YELLOW, GREY)
OPERATIONS: Mapping[Op, str] = {
    Op.FORWARD: SKY,
    Op.BACKWARD: ORANGE,
    Op.BACKWARD_INPUT: YELLOW,
    Op.BACKWARD_WEIGHT: VERMILION,
    Op.REDUCE_GRAD: PURPLE,
    Op.UPDATE: GREEN,
    Op.PREPARE: GREY,
    **dict.fromkeys((Op.SEND_FORWARD, Op.SEND_BACKWARD), BLUE),
    **dict.fromkeys((Op.RECV_FORWARD, Op.RECV_BACKWARD), GREY),
}
"""Colours by operation."""
WORDS: Mapping[Op, str] = {
    **tables.WORDS,
    **dict.fromkeys((Op.SEND_FORWARD, Op.SEND_BACKWARD), "sending"),
    **dict.fromkeys((Op.RECV_FORWARD, Op.RECV_BACKWARD), "receiving"),
}


def stage_colour(number: int) -> str:
    """Of stages, and of ranks where these are what is told apart: the same from one figure to the next."""
    return COLOURS[number % len(COLOURS)]
