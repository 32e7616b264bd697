"""Devices and hosts for measurements on one machine.

Virtual, steady and timed ones, and hosts with rate-limited links.
"""

from __future__ import annotations

__all__: list[str] = []
