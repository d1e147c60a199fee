"""Makes the harness importable by the tests beside it, and that of kills and lost power, which it builds on."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for directory in (HERE.parent / "crash", HERE):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
