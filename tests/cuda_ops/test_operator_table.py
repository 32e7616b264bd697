"""Every row of the table is of an operator that there is, and says what its readers know."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import cuda_ops.sparse.operators  # registers its operators
from cuda_ops.operator_table import OPERATORS, OperatorRow, functional_row, name_of, operator_row
from planner.layers import kind
from planner.layers.elementwise import ELEMENTS, PLACES
from profiler.capture.kinds import ELEMENTWISE, LOSS
from runtime.stage.random.layers import drawing

assert cuda_ops.sparse.operators
OF_PYTHON = {"getitem"}
ATEN = torch.ops.aten


def overloads(row: OperatorRow) -> list[object]:
    """Of the operators that have the row's name."""
    packets = [
        getattr(namespace, f"{before}{row.name}", None)
        for namespace in (ATEN, torch.ops.halopipe)
        for before in ("", "_")
    ]
    return [getattr(packet, name) for packet in packets if packet is not None for name in packet.overloads()]


def test_every_row_is_of_an_operator() -> None:
    assert [row.name for row in OPERATORS.values() if not overloads(row)] == [*OF_PYTHON]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (ATEN._to_copy.default, "to_copy"),
        (ATEN.relu_.default, "relu"),
        (ATEN.add.Tensor, "add"),
        (torch.ops.halopipe.sparse_conv.default, "sparse_conv"),
    ],
)
def test_overloads_and_writes_share_a_row(target: object, name: str) -> None:
    assert operator_row(target).name == name


def test_a_write_is_not_replaced_by_what_its_twin_is() -> None:
    assert operator_row(ATEN.normal_.default).draws
    assert functional_row(ATEN.normal_.default) == OperatorRow("normal")
    assert functional_row(ATEN.normal.Tensor_float).draws


def test_rows_say_what_their_readers_know() -> None:
    words: dict[str, Counter[str]] = {
        column: Counter(str(getattr(row, column)) for row in OPERATORS.values())
        for column in ("linear", "terms", "samples", "fills", "drops")
    }
    assert set(words["linear"]) == {"", "all", "first", "each"}
    assert set(words["terms"]) == {"", ELEMENTS, PLACES}
    assert set(words["samples"]) == {"", "dim", "each", "last two", "letters", "like", "places", "product"}
    assert set(words["fills"]) == {"", "empty", "full", "ones", "zeros"}
    assert set(words["drops"]) == {"", "channels", "elements", "layers"}
    for row in OPERATORS.values():
        assert all(kind(name) for name in row.kinds)
        assert not row.drops or row.draws
        assert row.terms == "" or LOSS in row.kinds


def test_what_draws_in_parts_has_a_function_and_is_random() -> None:
    for row in OPERATORS.values():
        drawn = [each for each in overloads(row) if drawing(each) is not None]
        assert bool(drawn) is bool(row.draws), row.name
        assert all(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in drawn), row.name


def test_what_torch_calls_elementwise_is_no_other_kind() -> None:
    other = {"max", "min"}  # of two tensors elementwise, of one a reduction
    for row in OPERATORS.values():
        tagged = any(torch.Tag.pointwise in getattr(each, "tags", ()) for each in overloads(row))
        assert not tagged or {*row.kinds} <= {ELEMENTWISE} or row.name in other


def test_names_are_those_of_schemas() -> None:
    assert name_of(ATEN._unsafe_view.default) == "unsafe_view"
    assert name_of(len) == "len"


def test_nothing_is_known_of_another_library_whose_operators_have_names_of_torchs() -> None:
    for name in ("linear", "embedding", "batch_norm"):
        own = torch.library.custom_op(
            f"halopipe_tests::{name}", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        target = torch.ops.halopipe_tests.__getattr__(name).default
        assert own is not None
        assert operator_row(target) == functional_row(target) == OperatorRow(name)
