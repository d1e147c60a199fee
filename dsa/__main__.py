"""Run ``python -m dsa``."""

import sys

from dsa.cli import main

sys.exit(main())
