"""Under which conditions on its sizes a graph was captured, and the sizes that turn out to be fixed.

``torch.export`` notes a guard whenever code asks something about a size.  What the user's code asked decides which
operators are in the graph, and stays a condition, as do largest extents; what torch asked inside its operators does not
matter: they look at the shapes again whenever they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor

from planner.ir.errors import UnsupportedModelError

_TORCH = Path(torch.__file__).parent
_INSIDE = ("fx", "export", "utils")  # and what begins with "_": torch's own ways, not what a user's module calls


def require(holds: bool, what: str, **sizes: int) -> None:
    """Raises :class:`UnsupportedModelError` unless ``holds``: the graph was captured under a condition on ``sizes``."""
    if not holds:
        numbers = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise UnsupportedModelError(
            f"the model was captured for other sizes than {numbers}",
            [f"what was captured holds for {what}"],
            ["give batches of such sizes", "or a model whose code does the same whatever the sizes are"],
        )


def require_free(name: str, value: Tensor, tensor: str, dim: int, extent: int) -> None:
    """Raises :class:`UnsupportedModelError` if the size ``name``, ``dim`` of ``tensor``, is a number after all.

    Args:
        value: of ``tensor`` in the exported graph.
        extent: in the example.
    """
    size = value.shape[dim]
    if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
        return
    raise UnsupportedModelError(
        f"{name} cannot vary: the model fixes it to {int(size)}",
        [f"dim {dim} of {tensor} is said to vary from the example's {extent}", *_causes(value, extent)],
        [
            "take sizes from x.shape where they are used, rather than as numbers",
            "x.amax(dim), x.mean(dim) or adaptive pooling instead of a pool as large as the extent",
            "nn.LSTM, nn.GRU or nn.RNN instead of a loop over steps",
            f"or leave {name} out of what varies, and give batches of {extent} only",
        ],
    )


def _causes(value: Tensor, extent: int) -> list[str]:
    """Where the model asked for the extent as a number, if it did so itself."""
    environment = _environment(value)
    guards = [] if environment is None else environment.guards
    frames = [
        guard.sloc.framework_loc
        for guard in guards
        if isinstance(guard.expr, sympy.Eq) and guard.expr.rhs == extent and _is_by_user(guard)
    ]
    return [f"at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if frame is not None][:1]


def conditions(names: Mapping[Any, str], same: Mapping[Any, Any], inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What must be true of the sizes, as sympy's expressions of their symbols.

    Args:
        names: of the sizes that vary, by symbol; conditions on none of these are left out.
        same: symbols that stand for the same number as another.
        inputs: the values of the graph's placeholders.
    """
    environments = [_environment(value) for value in inputs.values()]
    if not names or not environments or environments[0] is None:
        return ()
    found: dict[Any, None] = {}
    for guard in environments[0].guards:
        condition = environments[0].replace(guard.expr).xreplace(same)
        if condition.free_symbols & names.keys() and (_is_by_user(guard) or _is_limit(condition)):
            found[condition] = None
    return tuple(found)


def _environment(value: Tensor) -> Any | None:
    """Where torch keeps what it knows of the symbols."""
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def _is_by_user(guard: Any) -> bool:
    """Whether the code that asked is the user's, or of a module or function of torch that the user called."""
    frame = guard.sloc.framework_loc
    file = Path(getattr(frame, "filename", ""))
    if not file.is_relative_to(_TORCH):
        return True
    first = file.relative_to(_TORCH).parts[0]
    return not first.startswith("_") and first not in _INSIDE


def _is_limit(condition: Any) -> bool:
    """Whether it is a largest extent."""
    return isinstance(condition, (sympy.Le, sympy.Lt)) and condition.lhs.is_Symbol and condition.rhs.is_Integer
