"""How many rows of each tensor of a batch belong to a sample, where that is more than one.

    tokens [8, 96], targets [8 x 96]                  1 row of tokens, 96 of targets
    tokens [8 x 96], reshaped to [-1, 96] in forward  96 rows
    pictures [2 x 8, ...], two views of a sample      2 rows

torch.export is asked how the lengths of the tensors are related: it is given all of them as symbols, and notes which
must be multiples of a number, or of one another.  Whether the samples lie one after another, each in one piece, is for
:mod:`profiler.capture.sample_independence` to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, lcm
from typing import Any

import sympy
import torch
from torch import Tensor

from profiler.capture.sizes import guards_of


def rows_of_samples(lengths: Mapping[str, int], traced: Mapping[str, Tensor]) -> dict[str, int]:
    """Rows that a sample has in each tensor that holds samples; empty where samples have one row each, or none is seen.

    Args:
        lengths: of dim 0 in the example, by tensor, the first input first.
        traced: the same tensors in a graph in which each such length is a symbol of its own, as far as it can vary.
    """
    symbolic = dict(_symbolic(lengths, traced))
    first = next(iter(lengths))
    if first not in symbolic:
        return {}
    guards = guards_of(traced.values())
    related = _related(symbolic[first].free_symbols, guards)
    own = {size: lengths[name] for name, size in symbolic.items() if size.is_Symbol and size in related}
    samples = gcd(*(length // _multiple_of(symbol, guards) for symbol, length in own.items()))
    rows = {name: lengths[name] // samples for name, size in symbolic.items() if size.free_symbols <= related}
    return rows if set(rows.values()) != {1} else {}


def _symbolic(lengths: Mapping[str, int], traced: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    for name in lengths:
        size: Any = traced[name].shape[0]
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
            yield name, size.node.expr


def _related(symbols: set[Any], guards: Sequence[Any]) -> set[Any]:
    """``symbols``, and those that equations lead to from them."""
    equations = [guard.free_symbols for guard in guards if isinstance(guard, sympy.Eq)]
    related = set(symbols)
    before = 0
    while len(related) > before:
        before = len(related)
        related.update(*(each for each in equations if not each.isdisjoint(related)))
    return related


def _multiple_of(symbol: Any, guards: Sequence[Any]) -> int:
    """The number that a length must be a multiple of: 12 after ``tokens.view(-1, 12)``."""
    number = 1
    for guard in guards:
        remainder = guard.lhs if isinstance(guard, sympy.Eq) and guard.rhs == 0 else None
        if remainder is None or remainder.free_symbols != {symbol} or len(remainder.args) != 2:
            continue
        size, divisor = remainder.args
        factor = size.coeff(symbol)
        if divisor.is_Integer and factor.is_Integer and size == factor * symbol:
            number = lcm(number, int(divisor) // gcd(int(factor), int(divisor)))
    return number
