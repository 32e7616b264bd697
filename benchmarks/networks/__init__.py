"""Networks of other people through profile, plan and run on two workers, beside one device."""

from __future__ import annotations

__all__: list[str] = []
