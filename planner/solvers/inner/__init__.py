"""The inner search: one of a few options for every layer of a stage, exactly; options may be layouts or anything else."""

from __future__ import annotations

__all__: list[str] = []
