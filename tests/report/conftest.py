"""Recordings are made here as in their own tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "replay"))
