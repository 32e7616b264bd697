"""What helps where a layer cannot be cut along a dim."""

from __future__ import annotations

from planner.ir.graph import Layer


def operator_of(layer: Layer) -> str:
    """The operator that the layer calls, as people know it: ``aten.softmax.int``; its kind if that is not known."""
    return str(layer.attributes.get("op") or layer.kind)


def remedies(layer: Layer, along: str) -> tuple[str, str, str]:
    """The three remedies for a layer that cannot be cut ``along`` a dim or family of dims."""
    parts = operator_of(layer).split(".")
    name = "::".join(parts[:2]) if len(parts) > 1 else "its operator"
    return (
        f"gather: leave {along} uncut in {layer.name}, so that each rank gets its input whole",
        f"register a rule for {name}: profiler.capture.kinds.Rules(kinds=...)",
        f"mark it elementwise, if it treats each element by itself: halopipe profile --elementwise {name}",
    )
