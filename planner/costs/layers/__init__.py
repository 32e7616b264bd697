"""What a layer costs: as measured, read between measurements, or by a model of its family or device."""

from __future__ import annotations

__all__: list[str] = []
