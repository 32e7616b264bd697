"""Which layers a stage of several ranks may run on a part of the sites."""

from __future__ import annotations

import pytest

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import MIXES_SAMPLES, Attribute, Graph, Layer, TensorSpec
from runtime.sparse.rules import require_shareable

X = TensorSpec(("sites", "channel"), (9, 4), "float64")
MAP = TensorSpec(("dim0", "sites"), (27, 9), "int32")
ROW = TensorSpec(("sites",), (9,), "float64")
SAMPLES = TensorSpec(("sample", "channel"), (2, 4), "float64")
TURNED = TensorSpec(("channel", "sites"), (4, 9), "float64")


def require(kind: str, read: TensorSpec, made: TensorSpec, **attributes: Attribute) -> None:
    layer = Layer("it", kind, ("read",), (made,), (), {"op": "an.operator", **attributes})
    require_shareable(Graph(2, {"read": read}, (layer,), {}, "it"), frozenset({"it"}), 3)


@pytest.mark.parametrize(
    ("kind", "read", "made", "attributes"),
    [
        ("pointwise", X, X, {}),
        ("pointwise", MAP, MAP, {}),
        ("batch_norm", X, X, {}),
        ("linear", X, X, {}),
        ("softmax", X, X, {"dim": 1}),
        ("concat", X, X, {"dim": 1}),
        ("concat", ROW, X, {"dim": 1}),
        ("reduce", X, ROW, {"dims": (1,)}),
        ("reduce", MAP, ROW, {"dims": (0,)}),
        ("reshape", X, TURNED, {"kept": (1, 0)}),
        ("slice", X, ROW, {"dim": 1}),
        ("loss", X, ROW, {}),
        ("segment", X, SAMPLES, {}),
        ("segment_expand", SAMPLES, X, {}),
        ("opaque", X, X, {}),
        ("opaque", SAMPLES, SAMPLES, {MIXES_SAMPLES: True}),
    ],
)
def test_what_a_site_gets_of_itself_alone_may_be_run(
    kind: str, read: TensorSpec, made: TensorSpec, attributes: dict[str, Attribute]
) -> None:
    require(kind, read, made, **attributes)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "read", "made", "attributes"),
    [
        ("softmax", X, X, {"dim": 0}),
        ("concat", X, X, {"dim": 0}),
        ("reduce", X, TensorSpec(("sites", "channel"), (1, 4), "float64"), {"dims": (0,)}),
        ("reduce", X, TensorSpec(("channel",), (4,), "float64"), {"dims": (0,)}),
        ("slice", X, X, {"dim": 0}),
        ("loss", X, TensorSpec((), (), "float64"), {}),
        ("layer_norm", TURNED, TURNED, {}),
        ("linear", TURNED, TURNED, {}),
        ("opaque", X, X, {MIXES_SAMPLES: True}),
        ("opaque", X, SAMPLES, {}),
        ("attention", X, X, {}),
    ],
)
def test_what_needs_the_sites_of_others_is_refused(
    kind: str, read: TensorSpec, made: TensorSpec, attributes: dict[str, Attribute]
) -> None:
    with pytest.raises(
        UnsupportedModelError, match="stage 3 cannot share out sites: layer it needs those of all ranks"
    ):
        require(kind, read, made, **attributes)


def test_layers_of_other_stages_are_not_asked_about() -> None:
    layer = Layer("it", "attention", ("read",), (X,), (), {})
    require_shareable(Graph(2, {"read": X}, (layer,), {}, "it"), frozenset(), 0)
