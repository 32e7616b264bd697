"""A small network of causal attention, and a profile of it by formula: for the tests of token slices."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.chains import chain_profile
from planner.ir.graph import SAMPLE, Graph, Layer, TensorSpec
from planner.ir.profile import Measurement, ParameterCost, Profile

TOKENS = 16
WIDTH = 4
SAMPLES = 2
_LIKE = {"op": "aten.linear.default"}


def graph(num_blocks: int = 4, tokens: int = TOKENS, *, causal: bool = True) -> Graph:
    """Embedding, blocks of one projection and attention to it, head, and a loss over rows of samples and tokens."""
    features = TensorSpec((SAMPLE, "time", "feature"), (SAMPLES, tokens, WIDTH), "float32")
    heads = TensorSpec((SAMPLE, "head", "time", "feature"), (SAMPLES, 1, tokens, WIDTH), "float32")
    indices = TensorSpec((SAMPLE, "time"), (SAMPLES, tokens), "int64")
    rows = TensorSpec((SAMPLE, "feature"), (SAMPLES * tokens, WIDTH), "float32")
    targets = TensorSpec((SAMPLE,), (SAMPLES * tokens,), "int64")
    attributes = {"op": "aten.scaled_dot_product_attention.default", **({"causal": True} if causal else {})}
    layers = [Layer("token", "embedding", ("x",), (features,), ("token.weight",))]
    last = "token"
    for block in range(num_blocks):
        layers += [
            Layer(f"p{block}", "linear", (last,), (features,), (f"p{block}.weight",), _LIKE),
            Layer(f"h{block}", "reshape", (f"p{block}",), (heads,), (), {"kept": (0, -1, 1, 2)}),
            Layer(f"a{block}", "attention", (f"h{block}",) * 3, (heads,), (), attributes),
            Layer(f"r{block}", "reshape", (f"a{block}",), (features,), (), {"kept": (0, 2, 3)}),
        ]
        last = f"r{block}"
    layers += [
        Layer("head", "linear", (last,), (features,), ("head.weight",), _LIKE),
        Layer("rows", "reshape", ("head",), (rows,), (), {"kept": (-1, 2)}),
        Layer("targets", "reshape", ("y",), (targets,)),
        Layer("loss", "loss", ("rows", "targets"), (TensorSpec((), (), "float32"),), (), {"terms": "places"}),
    ]
    weight = TensorSpec(("dim0", "dim1"), (WIDTH, WIDTH), "float32")
    names = [name for layer in layers for name in layer.parameters]
    return Graph(SAMPLES, {"x": indices, "y": indices}, tuple(layers), dict.fromkeys(names, weight), "loss")


def attention_s(samples: int, length: int, before: int) -> float:
    """Of a slice: each query reads the keys up to it."""
    return 1e-4 * samples * (0.2 * length + 0.05 * length * before + 0.025 * length**2)


def profile(num_devices: int = 2, *, blocks: int = 4, behind: bool = True, latency_s: float = 1e-6) -> Profile:
    """Its layers take as long as they have tokens, attention as :func:`attention_s` says.

    Args:
        behind: whether slices of attention were measured behind other tokens.
    """
    made = graph(blocks)

    def seconds(layer: Layer, samples: int, length: int, before: int = 0) -> float:
        if layer.kind == "attention":
            return attention_s(samples, length, before)
        return 1e-4 * samples * length if layer.parameters else 0.0

    def measured(layer: Layer, samples: int, length: int = TOKENS, before: int = 0) -> Measurement:
        spent = seconds(layer, samples, length, before)
        saved = 64 * samples * length
        part = () if length == TOKENS else (1, length, WIDTH)
        found = Measurement(layer.name, samples, spent, 2 * spent, spent, spent, saved, 0, 10, part=part)
        return replace(found, before=before)

    sizes = (1, 2)
    whole = tuple(measured(layer, samples) for layer in made.layers for samples in sizes)
    attention = [layer for layer in made.layers if layer.kind == "attention"]
    places = [(length, 0) for length in (2, 4, 8)]
    places += [(2, 14), (2, 4), (4, 12), (4, 4), (8, 8), (8, 2)] if behind else []
    parts = tuple(measured(each, n, length, before) for each in attention for n in sizes for length, before in places)
    base = chain_profile(2, num_devices, latency_s=latency_s)
    (kind,) = base.measurements
    costs = {layer.name: ParameterCost(0.0, 0.0) for layer in made.layers if layer.parameters}
    return replace(base, graph=made, measurements={kind: whole}, parts={kind: parts}, parameters={kind: costs})
