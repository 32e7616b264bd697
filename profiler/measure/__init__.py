"""What each layer takes: seconds, bytes and optimiser steps, in fresh and quiet processes."""

from __future__ import annotations

__all__: list[str] = []
