"""As of divided layers: convolutions of these tests are small, and the form of large ones is what they are about."""

from __future__ import annotations

from tests.runtime.spatial.conftest import overlapped_whatever_the_size

FIXTURES = (overlapped_whatever_the_size,)
