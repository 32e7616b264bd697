"""Devices and hosts for measurements on one machine.

Virtual, steady, timed and sleeping ones, and hosts with rate-limited links.
"""

from __future__ import annotations

__all__: list[str] = []
