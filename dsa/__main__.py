"""Run ``python -m dsa``."""

import sys

from dsa.cli.program import main

sys.exit(main())
