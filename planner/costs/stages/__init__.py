"""What a stage costs.

Where it lies, the layouts of its layers, its input pipeline, its gradients, and what was not measured.
"""

from __future__ import annotations

__all__: list[str] = []
