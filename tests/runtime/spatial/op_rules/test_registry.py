"""The table of op rules names what is there, and all of it."""

from __future__ import annotations

import ast
from pathlib import Path

from planner.layers import kinds
from runtime.spatial import op_rules
from runtime.spatial.op_rules import form
from runtime.spatial.op_rules.generic import run_on_reads


def test_a_rule_is_that_of_a_layer_kind_and_can_be_loaded() -> None:
    assert set(op_rules._RULES) <= set(kinds())
    for kind, name in op_rules._RULES.items():
        assert f"{form(kind).__module__}.{form(kind).__name__}" == f"{op_rules.__name__}.{name}"


def test_no_rule_is_written_that_the_table_leaves_out() -> None:
    written = {
        f"{path.stem}.{node.name}"
        for path in Path(op_rules.__path__[0]).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("run_")
    }
    assert written == {op_rules._ANY_KIND, *op_rules._RULES.values()}


def test_a_kind_without_a_rule_of_its_own_reads_all_that_it_needs() -> None:
    assert form("reduce") is run_on_reads
