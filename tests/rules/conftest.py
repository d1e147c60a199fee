"""Makes the helpers importable by the tests beside them, and the oracles of `tests/kernels`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels")]
