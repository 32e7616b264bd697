"""PipeDream (Narayanan et al., SOSP 2019): the shortest slowest stage of a pipeline with replicated stages."""

from __future__ import annotations

__all__: list[str] = []
