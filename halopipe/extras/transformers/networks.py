"""The network of ``halopipe ways``: a name, a ``config.json`` or sizes; and how it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from halopipe.terminal import units
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.hf_config import Described, read_config
from planner.extras.transformers.memory import SINGLE
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.shape import TRANSFORMERS, Precision, Transformer, named_transformer
from planner.ir.errors import UsageError

_NEEDED = ("hidden", "ffn", "heads", "layers", "vocab", "seq")
_UNTOLD = ("value_size", "shared_gate", "router_bias", "rotary_base", "settings")
"""Of what is left out that which follows from others, is of experts, or changes no price."""
_UNTYPED = ("name", "settings")
"""Of a shape what is no size, and nobody types."""


@dataclass(frozen=True, slots=True)
class Network:
    """A transformer, and what is to be said of how it was asked for.

    Attributes:
        left_out: sizes, or fields of a ``config.json``, that were not given, with what they are then.
        notes: what was put in place of its own, and what is not priced.
    """

    shape: Transformer
    left_out: Mapping[str, Any]
    notes: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """As plain data."""
        shape = self.shape
        counts = {"total": shape.parameters, "active": shape.active_parameters, "mtp": shape.mtp_parameters}
        return {"parameters": counts, "left_out": dict(self.left_out), "notes": list(self.notes)}

    def lines(self, cluster: GpuCluster | Pools, precision: Precision) -> list[str]:
        """For people: what it is, and what was not said of it."""
        shape = self.shape
        parts = [f"{_rounded(shape.parameters)} parameters"]
        if shape.experts:
            parts[0] += f", {_rounded(shape.active_parameters)} of them for a token"
        if shape.mtp:
            parts.append(f"{_rounded(shape.mtp_parameters)} more in {units.count(shape.mtp, 'block')} of MTP")
        if shape.first_dense:
            blocks = units.count(shape.first_dense, "dense block")
            parts.append(f"{blocks} on the first stage, before the {shape.layers} that stages share")
        parts.append(f"sequence {shape.seq:,}")
        half = "bfloat16 or float16, gradients and optimiser in float32"
        if precision is Precision.FP8:
            half = f"products of blocks in 8 bits, others in {half}"
        parts.append("float32" if cluster.width == SINGLE else half)
        lines = [f"{shape.name}: {'; '.join(parts)}"]
        if self.left_out:
            values = ", ".join(f"{name}={_value(value)}" for name, value in self.left_out.items())
            lines.append(f"  not given, and taken as: {values}")
        return [*lines, *(f"  {note}" for note in self.notes)]


def network_of(text: str) -> Network:
    """A transformer by name, by the path of a ``config.json`` or of its folder, or by sizes.

    Behind a name or a path there may be sizes in place of its own: ``llama3-8b,seq=4096``.

    Raises:
        UnknownNameError, UsageError: there is none of that name; a size is missing, unknown or no number above 0.
        MissingFileError, CorruptFileError, UnsupportedModelError: of a ``config.json``.
    """
    first, _, rest = text.partition(",")
    path = Path(first)
    if first not in TRANSFORMERS and (path.suffix == ".json" or path.is_dir()):
        described = read_config(path)
        sizes = _sizes(rest)
        longest = [] if "seq" in sizes or not described.longest else [_sequence(described)]
        return _changed(Network(described.shape, described.left_out, (*described.notes, *longest)), sizes)
    if "=" not in first:
        return _changed(Network(named_transformer(first), {}, ()), _sizes(rest))
    sizes = _sizes(text)
    if missing := [name for name in _NEEDED if name not in sizes]:
        raise UsageError(f"a transformer needs {', '.join(missing)} too", [f"given: {text}"], [f"{missing[0]}=..."])
    if sizes["hidden"] % sizes["heads"] and not sizes.get("head_size"):
        raise UsageError(
            f"hidden={sizes['hidden']} is not divided by heads={sizes['heads']}",
            [f"in {text}"],
            ["head_size=..., where heads are not hidden / heads wide"],
        )
    shape = Transformer(name="transformer", **sizes)
    not_asked = ("name", *sizes, *_UNTOLD)
    others = {each.name: getattr(shape, each.name) for each in fields(shape) if each.name not in not_asked}
    return Network(shape, {name: value for name, value in others.items() if isinstance(value, bool) or value}, ())


def _sequence(described: Described) -> str:
    return f"sequence {described.shape.seq:,} of the {described.longest:,} that it may have: seq=... asks for another"


def _changed(network: Network, sizes: Mapping[str, Any]) -> Network:
    """With sizes in place of its own."""
    own = {name: getattr(network.shape, name) for name in sizes}
    notes = [f"{name}={_value(sizes[name])} in place of {_value(own[name])}" for name in sizes]
    return replace(network, shape=replace(network.shape, **sizes), notes=(*notes, *network.notes))


def _sizes(text: str) -> dict[str, Any]:
    """Sizes by name."""
    size_fields = {field.name: field for field in fields(Transformer) if field.name not in _UNTYPED}
    flags = [name for name, field in size_fields.items() if isinstance(field.default, bool)]

    def size(name: str, value: str) -> int | bool:
        units.require_known("size of a transformer", [name], list(size_fields))
        return {"0": False, "1": True}[value] if name in flags else units.whole(value, 1 if name in _NEEDED else 0)

    return units.parse_pairs(text, size, "is no size of a transformer", "hidden=768,heads=12,dropout=0")


def _value(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _rounded(number: int) -> str:
    """Four digits: ``8.03 billion``, ``356.9 million``; below a million all."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.4g} {word}"
    return f"{number:,}"
