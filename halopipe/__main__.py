"""``python -m halopipe``."""

from __future__ import annotations

import sys

from halopipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
