"""How a node of a captured graph calls its operator: arguments by the names of the schema, what it writes and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cuda_ops._torch import schema_of


def parameters_of(target: object) -> tuple[Any, ...]:
    """The arguments that an operator's schema has; none of what has no schema."""
    schema = schema_of(target)
    return () if schema is None else tuple(schema.arguments)


def argument_names(target: object) -> list[str]:
    """Their names, in order."""
    return [parameter.name for parameter in parameters_of(target)]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    parameters = parameters_of(node.target)
    defaults = {each.name: each.default_value for each in parameters if each.has_default_value()}
    return {**defaults, **dict(zip((each.name for each in parameters), node.args, strict=False)), **node.kwargs}


def changed_call(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by place and by name, with ``changes`` of some by their names."""
    names = argument_names(target)[: len(args)]
    by_place = tuple(changes.get(name, value) for name, value in zip(names, args, strict=True))
    return by_place, {**kwargs, **{name: value for name, value in changes.items() if name not in names}}


def writes(target: object) -> bool:
    """Whether an operator writes to one of its arguments, as its schema tells."""
    return any(each.alias_info is not None and each.alias_info.is_write for each in parameters_of(target))


def draws(target: object) -> bool:
    """Whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
