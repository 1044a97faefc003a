"""The lives that are recorded here are those of other tests."""

import sys
from pathlib import Path

for name in ("hybrid", "storage"):
    sys.path.append(str(Path(__file__).parent.parent / name))
