"""Recurrent layers: samples are apart; of what they make, other dims are cut as the layout says."""

from __future__ import annotations

from runtime.decomposition.forms.opaque import run

__all__ = ["run"]
