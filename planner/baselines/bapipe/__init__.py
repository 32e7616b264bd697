"""BaPipe (Zhao et al., 2020): a balanced pipeline with one device a stage, and the schedule that suits the links."""

from __future__ import annotations

__all__: list[str] = []
