"""Makes the helpers importable by the tests beside them, and closes what a test has opened."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def make(tmp_path):
    """A `layers.Maker` over an empty directory; everything it made is closed afterwards."""
    from layers import Maker

    with Maker(tmp_path) as maker:
        yield maker
