from __future__ import annotations

from collections.abc import Callable

import pytest

from halopipe.data.factories import call_of
from planner.ir.errors import FactoryError

GIVEN = {"global_batch": 8, "input_shape": (3, 4), "seed": 7}


@pytest.mark.parametrize(
    ("factory", "expected", "text"),
    [
        (lambda: (), (), ""),
        (lambda batch: (batch,), (8,), "batch=8"),
        (lambda seed: (seed,), (7,), "seed=7"),
        (lambda batch, seed: (batch, seed), (8, 7), "batch=8, seed=7"),
        (lambda seed, size: (seed, size), (7, 8), "seed=7, size=8"),
        (lambda b, s, r: (b, s, r), (8, (3, 4), 7), "b=8, s=(3, 4), r=7"),
        (lambda root="here": (root,), ("here",), ""),
        (lambda root="here", batch_size=1: (root, batch_size), ("here", 8), "batch_size=8"),
        (lambda *rest: rest, (8, (3, 4), 7), "global_batch=8, input_shape=(3, 4), seed=7"),
        (lambda batch, *rest: (batch, *rest), (8, (3, 4), 7), "batch=8, input_shape=(3, 4), seed=7"),
        (lambda *, seed=1, **rest: (seed, rest), (7, {}), "seed=7"),
    ],
)
def test_a_factory_is_given_what_it_takes(factory: Callable[..., object], expected: object, text: str) -> None:
    call = call_of("d.py:f", factory, GIVEN)
    assert (call.make(), call.text) == (expected, f"d.py:f({text})")


@pytest.mark.parametrize("factory", [lambda a, b, c, d: 0, lambda *, root: 0, lambda seed, a, b, c: 0])
def test_a_factory_that_wants_more_is_told_what_there_is(factory: Callable[..., object]) -> None:
    with pytest.raises(FactoryError, match="which nobody gives it") as caught:
        call_of("d.py:f", factory, GIVEN)
    assert "global_batch, input_shape, seed" in caught.value.remedies[0]
