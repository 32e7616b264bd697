from __future__ import annotations

import re
from dataclasses import replace

import pytest

from planner.ir.errors import StaleFileError
from planner.ir.fingerprint import fingerprint, require_match
from tests.planner.factories import chain_profile


def test_equal_contents_have_equal_fingerprints_whatever_their_order() -> None:
    assert fingerprint({"a": 1, "b": (1, 2)}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint(chain_profile(3)) == fingerprint(chain_profile(3))
    assert re.fullmatch(r"sha256:[0-9a-f]{16}", fingerprint(()))


def test_any_change_is_seen() -> None:
    profile = chain_profile(3)
    changed = replace(profile.graph.layers[1], attributes={"op": "aten.gelu.default"})
    graph = replace(profile.graph, layers=(profile.graph.layers[0], changed, *profile.graph.layers[2:]))
    assert fingerprint(graph) != fingerprint(profile.graph)
    assert fingerprint(replace(profile, action_overhead_s={"kind-1": 1e-9})) != fingerprint(profile)


def test_the_fingerprint_of_a_value_never_changes_between_releases() -> None:
    assert fingerprint({"stage": 1, "name": "é"}) == "sha256:7fcacae7e6049965"


def test_a_stale_file_is_refused_with_both_fingerprints() -> None:
    require_match("model", "sha256:1", "sha256:1", "plan again")
    with pytest.raises(StaleFileError, match="the plan was made for another model") as caught:
        require_match("model", "sha256:1", "sha256:2", "plan again")
    assert caught.value.details == ("plan: sha256:1", "here: sha256:2")
    assert caught.value.remedies == ("plan again",)
