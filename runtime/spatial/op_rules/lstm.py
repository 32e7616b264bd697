"""Recurrent layers: samples are apart; of what they make, other dims are cut as the layout says."""

from __future__ import annotations

from runtime.spatial.op_rules.opaque import run

__all__ = ["run"]
