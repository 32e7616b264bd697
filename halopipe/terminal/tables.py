"""Text pictures for terminals and logs: tables, bars and a Gantt chart of one step.

rank 0  n0/cpu0  F0░F1░······B0▓▓▓▓··B1▓▓▓▓U
rank 1  n0/cpu1  ····F0░B0▓▓F1░B1▓▓········U

Plain characters, the same everywhere, so that they can be piped, compared and tested.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from halopipe.terminal import console, units
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Span, Timeline

_FILL = {
    Op.FORWARD: "░",
    Op.BACKWARD: "▓",
    Op.BACKWARD_INPUT: "▓",
    Op.BACKWARD_WEIGHT: "▒",
    Op.REDUCE_GRAD: "=",
    Op.UPDATE: "#",
    Op.PREPARE: ":",
}
_LABEL = {Op.REDUCE_GRAD: "R", Op.UPDATE: "U"}
WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward for inputs",
    Op.BACKWARD_WEIGHT: "backward for weights",
    Op.REDUCE_GRAD: "gradient all-reduce",
    Op.UPDATE: "update",
    Op.PREPARE: "preparing on the host",
}
"""What is drawn of a step."""

_IDLE = "·"
_PICTURE = 96
_WIDE = 10_000
"""Columns of what is not for a screen."""
_QUANTITY = re.compile(r"[+-]?[\d.,]+( \S+)?|–|best")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 2, width: int | None = None) -> str:
    """Columns as wide as their widest cell; columns of quantities (``12``, ``+3.4 %``, ``–``) are flush right.

    Where that is wider than the screen, each row stands as a block, a line a column: nothing is cut.

    Args:
        width: of the screen; None: :func:`halopipe.terminal.console.screen_columns`.
    """
    columns = list(zip(header, *rows, strict=True))
    most = width or console.screen_columns()
    if most is not None and indent + sum(2 + max(map(len, column)) for column in columns) - 2 > most:
        return _blocks(header, rows, indent, most)
    numeric = [bool(rows) and all(_QUANTITY.fullmatch(cell) for cell in column[1:]) for column in columns]
    return _rendered([header, *rows], numeric, indent)


def _blocks(header: Sequence[str], rows: Sequence[Sequence[str]], indent: int, width: int) -> str:
    """A row's first cell, then its others with their names."""
    lines = []
    for first, *others in rows:
        lines.append(_rendered([[f"{header[0]} {first}".strip()]], [False], indent, width))
        pairs = [(name, cell) for name, cell in zip(header[1:], others, strict=True) if cell]
        lines += [_rendered(pairs, [False, False], 2 * indent, width)] if pairs else []
    return "\n".join(lines)


def _rendered(rows: Sequence[Sequence[str]], right: Sequence[bool], indent: int, width: int = _WIDE) -> str:
    """The cells as text, folded where they are wider than ``width``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for is_right in right:
        table.add_column(justify="right" if is_right else "left", overflow="fold", no_wrap=width == _WIDE)
    for row in rows:
        table.add_row(*map(Text, row))
    stream = io.StringIO()
    # Not of Jupyter: there it would show HTML of its own and write nothing.
    screen = Console(file=stream, width=width - indent, color_system=None, legacy_windows=False, force_jupyter=False)
    screen.print(table)
    return "\n".join((" " * indent + line).rstrip() for line in stream.getvalue().splitlines())


def bar(fraction: float, width: int = 24) -> str:
    """``[########................]``; beyond one, the last cell is ``!``."""
    filled = min(width, max(0, round(fraction * width)))
    cells = "#" * filled + "." * (width - filled)
    return f"[{cells[:-1]}!]" if fraction > 1 else f"[{cells}]"


def gantt(timeline: Timeline, devices: Sequence[str] = (), width: int = 0) -> str:
    """One line a rank, time to the right; a cell shows the action that fills most of it, ``·`` is idle or waiting.

    Args:
        devices: names by rank, shown beside the ranks.
        width: columns of the whole picture; 0: 96, or those of a narrower screen.
    """
    width = width or min(_PICTURE, console.screen_columns() or _PICTURE)
    ranks = range(max((span.rank for span in timeline.spans), default=-1) + 1)
    names = [f"rank {rank}" + (f"  {devices[rank]}" if rank < len(devices) else "") for rank in ranks]
    margin = max(map(len, names), default=0) + 2
    cells = max(10, width - margin)
    drawn = [(span, Action.parse(span.action)) for span in timeline.spans]
    drawn = [(span, action) for span, action in drawn if action.op in _FILL]
    lines = [
        name.ljust(margin) + _row([pair for pair in drawn if pair[0].rank == rank], timeline.step_s, cells)
        for rank, name in zip(ranks, names, strict=True)
    ]
    end = units.seconds(timeline.step_s)
    axis = " " * margin + "0" + end.rjust(cells - 1)
    shown = {action.op for _, action in drawn}
    legend = "   ".join(f"{_LABEL.get(op, op.value[0])} {word}" for op, word in WORDS.items() if op in shown)
    return "\n".join([*lines, axis, " " * margin + f"{legend}   {_IDLE} idle or waiting".strip()])


def _row(drawn: list[tuple[Span, Action]], step_s: float, cells: int) -> str:
    """The cells of one rank; a span's label stands at its start where it fits."""
    row = [_IDLE] * cells
    per_s = cells / step_s if step_s > 0 else 0.0
    several_stages = len({action.stage for _, action in drawn}) > 1
    for span, action in sorted(drawn, key=lambda pair: pair[1].op is not Op.PREPARE):  # compute covers it
        first = round(span.start_s * per_s)
        last = round(span.stop_s * per_s)
        length = min(cells, last) - first
        if length <= 0:
            continue
        label = _LABEL.get(action.op, f"{action.op.value[0]}{action.microbatch}")
        if several_stages:
            label = f"{action.stage}{label}"
        text = label if len(label) <= length else _FILL[action.op]
        row[first : first + length] = text.ljust(length, _FILL[action.op])
    return "".join(row)
