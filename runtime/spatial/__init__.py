"""Stages whose layers are divided along any dims: what moves between ranks inside a stage, and each rank's part."""

from __future__ import annotations

__all__: list[str] = []
