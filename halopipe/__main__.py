"""``python -m halopipe``."""

from __future__ import annotations

import sys

from halopipe.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
